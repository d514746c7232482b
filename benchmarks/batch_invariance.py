"""The cost of `batch_invariant=True`: `LLM.generate` with and without it, alternately, in one process.

    python benchmarks/batch_invariance.py [CHECKPOINT]

Prints median seconds and their ratio for each shape (requests, prompt tokens, new tokens). Prompts are random tokens,
and each round has new ones, so that no prefix is cached.
"""

from __future__ import annotations

import argparse
import random
import time

from common import median, table

from raycore import LLM, SamplingParams
from raycore.demo import demo_model_path

SHAPES = [(1, 32, 64), (16, 128, 64)]


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default=str(demo_model_path()), help="default: the bundled model")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    rows: list[list[object]] = [["shape", "plain s", "batch-invariant s", "ratio"]]
    with LLM(arguments.checkpoint) as plain, LLM(arguments.checkpoint, batch_invariant=True) as invariant:
        for shape in SHAPES:
            seconds = [
                [generate_s(llm, shape, index) for llm in (plain, invariant)] for index in range(arguments.rounds + 1)
            ]
            # without the first round, which warms up
            plain_s, invariant_s = (median(column) for column in zip(*seconds[1:], strict=True))
            rows.append([shape, f"{plain_s:.3f}", f"{invariant_s:.3f}", f"{invariant_s / plain_s:.2f}"])
    print(table(rows))


def generate_s(llm: LLM, shape: tuple[int, int, int], seed: int) -> float:
    """Seconds that a batch of this shape takes."""
    num_requests, num_prompt, num_new = shape
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, 300) for _ in range(num_prompt)] for _ in range(num_requests)]
    params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)
    started_s = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - started_s


if __name__ == "__main__":
    main()
