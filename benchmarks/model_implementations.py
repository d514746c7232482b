"""Decoded tokens per second of a checkpoint of one of raycore's families: by raycore's code, and by transformers'.

Both run in this process, in turn, for each batch size. Prompts are random tokens. Prints a table of medians.

    python benchmarks/model_implementations.py CHECKPOINT --batches 1 16 64 --num-threads 1
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path

from raycore.config import resolve
from raycore.engine.core import EngineCore
from raycore.executor.inline import InlineExecutor
from raycore.messages import EngineRequest
from raycore.sampling_params import SamplingParams
from raycore.worker.rank import RankIdentity

IMPLEMENTATIONS = ("raycore", "transformers")


def make_core(path: Path, implementation: str, args: argparse.Namespace) -> EngineCore:
    config = resolve(
        path,
        model_impl=implementation,
        dtype=args.dtype,
        load_format=args.load_format,
        num_threads=args.num_threads,
        max_model_len=args.prompt_length + args.new_tokens,
        max_num_seqs=max(args.batches),
        enable_prefix_caching=False,
    )
    executor = InlineExecutor(config, RankIdentity(0, 1))
    executor.initialize()
    return EngineCore(config, executor)


def tokens_per_second(core: EngineCore, batch: int, args: argparse.Namespace, seed: int) -> float:
    """Return how many tokens a second the steps give that only decode."""
    rng = random.Random(seed)
    vocab_size = core.config.model.spec.vocab_size
    params = SamplingParams(temperature=0, max_tokens=args.new_tokens, ignore_eos=True)
    for index in range(batch):
        prompt = [rng.randrange(vocab_size) for _ in range(args.prompt_length)]
        core.submit(EngineRequest(index, str(index), prompt, params, seed=0))
    times_s: list[float] = []
    while core.has_work():
        begun_s = time.perf_counter()
        outputs = core.step()
        took_s = time.perf_counter() - begun_s
        if outputs is not None and len(outputs.seq_ids) == batch:
            times_s.append(took_s)
    # the first of them may have computed prompts, too
    return batch / statistics.median(times_s[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 16, 64])
    parser.add_argument("--prompt-length", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--load-format", default="auto", choices=["auto", "dummy"])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    cores = {each: make_core(args.checkpoint, each, args) for each in IMPLEMENTATIONS}
    print("| batch | raycore, tokens/s | transformers, tokens/s | ratio |\n|---|---|---|---|")
    for batch in args.batches:
        found: dict[str, list[float]] = {each: [] for each in IMPLEMENTATIONS}
        for repeat in range(args.repeats):
            for each, core in cores.items():
                found[each].append(tokens_per_second(core, batch, args, repeat))
        own, other = (statistics.median(found[each]) for each in IMPLEMENTATIONS)
        print(f"| {batch} | {own:.1f} | {other:.1f} | {other / own:.2f} |", flush=True)


if __name__ == "__main__":
    main()
