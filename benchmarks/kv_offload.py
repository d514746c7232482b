"""Time to the first token of a prompt whose prefix is in the KV cache, on the host, in a directory, or nowhere.

    python benchmarks/kv_offload.py --model CHECKPOINT --prefix 1500

For each place, the median over several prompts, in milliseconds, and how many of the prompt's tokens weren't computed.
The prefixes in the directory are read by an engine that was started after another one had written them. Loads happen
where the cost model expects them to be faster than computing. `peer_prefixes.py` measures prefixes on another rank.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time

from common import median, table

from raycore import LLM, SamplingParams
from raycore.demo import demo_model_path

ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)
WRITTEN_S = 2.0
"""After so many seconds, all files have been written."""
_Times = list[tuple[float, int]]
"""(seconds, cached tokens) of each prompt."""


def engine(args: argparse.Namespace, directory: str | None) -> LLM:
    """One rank, which keeps blocks on the host, or only in a directory."""
    extra: dict[str, object] = {"cpu_bytes_to_use": args.host_bytes} if directory is None else {"path": directory}
    return LLM(
        args.model,
        dtype=args.dtype,
        num_threads=args.threads,
        max_model_len=args.prefix + 64,
        kv_transfer_config={"kv_connector": "OffloadConnector", "kv_connector_extra_config": extra},
        use_tqdm_on_load=False,
    )


def first_tokens(llm: LLM, prompts: list[list[int]]) -> _Times:
    """Run prompts one after the other."""
    times: _Times = []
    for prompt in prompts:
        began_s = time.monotonic()
        (output,) = llm.generate({"prompt_token_ids": prompt}, ONE_TOKEN, use_tqdm=False)
        times.append((time.monotonic() - began_s, output.num_cached_tokens or 0))
    return times


def measure(args: argparse.Namespace, prompts: list[list[int]], other: list[int]) -> dict[str, _Times]:
    """Times by where the prefixes are. `other`: a prompt for what is done once."""
    times: dict[str, _Times] = {}
    with engine(args, None) as llm:
        first_tokens(llm, [other])
        times["nowhere"] = first_tokens(llm, prompts)
        times["in the KV cache"] = first_tokens(llm, prompts)
        llm.reset_prefix_cache()
        times["on the host"] = first_tokens(llm, prompts)
    with tempfile.TemporaryDirectory(prefix="kv-offload-") as directory:
        with engine(args, directory) as llm:
            for prompt in prompts:
                first_tokens(llm, [prompt])
                time.sleep(WRITTEN_S)
        with engine(args, directory) as llm:
            first_tokens(llm, [other])
            times["in a directory"] = first_tokens(llm, prompts)
    return times


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(demo_model_path()))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prefix", type=int, default=1500, help="number of tokens")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--host-bytes", type=int, default=1 << 30)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ.setdefault("RAY_worker_niceness", "0")
    chance = random.Random(args.seed)
    prompts = [[chance.randrange(10, 400) for _ in range(args.prefix + 1)] for _ in range(args.repeats + 1)]
    rows: list[list[object]] = [["prefix", "ms", "tokens not computed"]]
    for place, times in measure(args, prompts[1:], prompts[0]).items():
        rows.append([place, f"{1000 * median([s for s, _ in times]):.1f}", median([float(n) for _, n in times])])
    print(table(rows), flush=True)


if __name__ == "__main__":
    main()
