"""Seconds from launching `python` to the first generated token of the bundled model, with DP=1 and DP=2.

raycore and vLLM (in its own environment, `--peer-python`; eager, so that it compiles nothing) start alternately. Each
start is a new process that imports the package, starts the engine and generates one token.

    python benchmarks/startup.py --peer-python PEER/bin/python
"""

from __future__ import annotations

import argparse

from common import PEER_ENVIRONMENT, median, run_child, table, this_python

from raycore.demo import demo_model_path

MOST_OF_PEER = 0.5

OURS = """
import sys, time, json
from raycore import LLM, SamplingParams
llm = LLM(sys.argv[1], data_parallel_size=int(sys.argv[2]))
output = llm.generate("27 + 58 =", SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
assert len(output[0].outputs[0].token_ids) == 1
print("@result " + json.dumps({"first_token": time.time()}), flush=True)
llm.shutdown()
"""

PEER = """
import asyncio, json, sys, time
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

async def main():
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(
        model=sys.argv[1], data_parallel_size=int(sys.argv[2]), enforce_eager=True, disable_log_stats=True))
    params = SamplingParams(temperature=0, max_tokens=1)
    async for output in llm.generate("27 + 58 =", params, request_id="first"):
        assert len(output.outputs[0].token_ids) == 1
    print("@result " + json.dumps({"first_token": time.time()}), flush=True)
    llm.shutdown()

if __name__ == "__main__":
    asyncio.run(main())
"""

_PEER_ENVIRONMENT = PEER_ENVIRONMENT | {"VLLM_CPU_KVCACHE_SPACE": "1"}


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peer-python", metavar="PATH", help="the interpreter that has vLLM; without it only raycore runs"
    )
    parser.add_argument("--model", default=str(demo_model_path()))
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    rows: list[list[object]] = [["DP", "raycore s", "vLLM s", "ratio", f"at most {MOST_OF_PEER}"]]
    for ranks in (1, 2):
        ours: list[float] = []
        peer: list[float] = []
        for _ in range(args.runs):
            ours.append(_seconds(this_python(), OURS, args.model, ranks, {}))
            if args.peer_python:
                peer.append(_seconds(args.peer_python, PEER, args.model, ranks, _PEER_ENVIRONMENT))
        ratio = median(ours) / median(peer) if peer else float("nan")
        verdict = "-" if not peer else "held" if ratio <= MOST_OF_PEER else "MISSED"
        rows.append([ranks, f"{median(ours):.2f}", f"{median(peer):.2f}" if peer else "-", f"{ratio:.2f}", verdict])
    print(f"medians of {args.runs} starts each, alternating; model {args.model}")
    print(table(rows))


def _seconds(python: str, script: str, model: str, ranks: int, environment: dict[str, str]) -> float:
    fields = run_child(python, script, [model, str(ranks)], environment)
    return fields["first_token"] - fields["launched"]


if __name__ == "__main__":
    main()
