"""Output tokens per second of `LLM.generate`: raycore and vLLM's CPU build in alternating runs.

Shapes are (batch, prompt tokens, new tokens). Prompts are random ids, decoding is greedy, end-of-sequence is ignored,
prefix caching is on. vLLM runs compiled: once with its defaults (it reserves a core), once tuned (two cores and Intel's
OpenMP). Each run is a new process that warms up, then times every shape `--repeats` times. The table has medians over
all timings. Both engines use `dtype="auto"` unless `--dtype` is given: on a processor without bfloat16 instructions,
raycore then computes in float32 and vLLM in bfloat16, and `--peer-dtype float32` makes vLLM faster.

A checkpoint needs at least 8,000 token ids and positions for 2,048 tokens; the bundled model has fewer of both.

    python benchmarks/offline_throughput.py --peer-python PEER/bin/python CHECKPOINT [CHECKPOINT ...]
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

from common import median, run_child, table, this_python

SHAPES = [(1, 32, 128), (16, 128, 128), (64, 128, 64)]
LEAST_OF_DEFAULT = 1.1

COMMON = """
import json, random, sys, time
model, dtype, repeats, shapes = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])

def measure(LLM, SamplingParams, **options):
    started = time.time()
    llm = LLM(model=model, dtype=dtype, max_model_len=2048, max_num_seqs=256, enable_prefix_caching=True, **options)
    started = time.time() - started
    rnd = random.Random(0)
    def prompts(batch, length):
        return [{"prompt_token_ids": [rnd.randrange(3, 8000) for _ in range(length)]} for _ in range(batch)]
    def generate(batch, length, new):
        warm_up = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        llm.generate(prompts(batch, length), warm_up, use_tqdm=False)
        ids = prompts(batch, length)
        begun = time.perf_counter()
        outputs = llm.generate(ids, SamplingParams(temperature=0, max_tokens=new, ignore_eos=True), use_tqdm=False)
        elapsed = time.perf_counter() - begun
        made = sum(len(output.outputs[0].token_ids) for output in outputs)
        assert made == batch * new, (made, batch, new)
        return made / elapsed
    rates = {str(shape): [generate(*shape) for _ in range(repeats)] for shape in map(tuple, shapes)}
    print("@result " + json.dumps({"startup": started, "rates": rates}), flush=True)
    return llm
"""

OURS = (
    COMMON
    + """
from raycore import LLM, SamplingParams
measure(LLM, SamplingParams).shutdown()
"""
)

PEER = (
    COMMON
    + """
if __name__ == "__main__":
    from vllm import LLM, SamplingParams
    measure(LLM, SamplingParams, disable_log_stats=True)
"""
)

PEER_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def main() -> None:
    """Run the benchmark and print a table for each checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT")
    parser.add_argument(
        "--peer-python", metavar="PATH", help="the interpreter that has vLLM; without it only raycore runs"
    )
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--peer-dtype", default=None, help="default: as --dtype")
    parser.add_argument("--runs", type=int, default=2, help="processes per engine")
    parser.add_argument("--repeats", type=int, default=3, help="timings per shape in one process")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="for one process")
    args = parser.parse_args()
    for checkpoint in args.checkpoints:
        _compare(checkpoint, args)


def _compare(checkpoint: str, args: argparse.Namespace) -> None:
    engines: dict[str, tuple[str, str, str, dict[str, str]]] = {"raycore": (this_python(), OURS, args.dtype, {})}
    if args.peer_python:
        peer_dtype = args.peer_dtype or args.dtype
        engines["vLLM"] = (args.peer_python, PEER, peer_dtype, PEER_ENVIRONMENT)
        engines["vLLM tuned"] = (args.peer_python, PEER, peer_dtype, PEER_ENVIRONMENT | _tuning(args.peer_python))
    rates: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    startups: dict[str, list[float]] = defaultdict(list)
    for _ in range(args.runs):
        for name, (python, script, dtype, environment) in engines.items():
            fields = run_child(
                python,
                script,
                [checkpoint, dtype, str(args.repeats), str([list(s) for s in SHAPES])],
                environment,
                args.timeout_s,
            )
            startups[name].append(fields["startup"])
            for shape, values in fields["rates"].items():
                rates[name][shape] += values
    runs = f"{args.runs} processes x {args.repeats} timings"
    print(f"\n{Path(checkpoint).name}: output tokens per second; medians of {runs}")
    print(f"dtype {args.dtype}, vLLM's {args.peer_dtype or args.dtype}")
    header: list[object] = ["(batch, prompt, new)", *engines]
    header += [f"/ {name}" for name in engines if name != "raycore"]
    rows = [header]
    for shape in map(str, SHAPES):
        medians = {name: median(rates[name][shape]) for name in engines}
        ratios = [medians["raycore"] / medians[name] for name in engines if name != "raycore"]
        rows.append([shape, *(f"{value:.1f}" for value in medians.values()), *(f"{ratio:.2f}" for ratio in ratios)])
    rows.append(["startup s", *(f"{median(startups[name]):.1f}" for name in engines), *([""] * (len(engines) - 1))])
    print(table(rows), flush=True)


def _tuning(peer_python: str) -> dict[str, str]:
    """Settings for vLLM on two cores, with the OpenMP runtime that it recommends, from its own environment."""
    environment = Path(peer_python).parent.parent
    return {"VLLM_CPU_OMP_THREADS_BIND": "0-1", "LD_PRELOAD": str(environment / "lib" / "libiomp5.so")}


if __name__ == "__main__":
    main()
