"""Scales from one rank to three and back while requests run, and reports throughput and failed requests.

python benchmarks/scaling.py [CHECKPOINT]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable

from common import table

from raycore import AsyncLLM, SamplingParams
from raycore.demo import demo_model_path, held_out_problems

PARAMS = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


class Load:
    """Callers that send one request after the other."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._prompts = [prompt for prompt, _ in held_out_problems(2, 200)]
        self.num_tokens = 0
        self.num_finished = 0
        self.errors: list[Exception] = []
        self.is_over = False

    async def call(self, caller: int) -> None:
        number = caller
        while not self.is_over:
            seen = 0
            try:
                async for output in self._llm.generate(self._prompts[number % len(self._prompts)], PARAMS):
                    self.num_tokens += len(output.outputs[0].token_ids) - seen
                    seen = len(output.outputs[0].token_ids)
                if seen != PARAMS.max_tokens:
                    raise RuntimeError(f"{seen} tokens instead of {PARAMS.max_tokens}")
                self.num_finished += 1
            except Exception as error:
                self.errors.append(error)
            number += 97


async def run(args: argparse.Namespace) -> Load:
    rows: list[list[object]] = [["", "seconds", "tokens/s", "requests finished"]]
    async with AsyncLLM(args.checkpoint, num_threads=1, use_tqdm_on_load=False) as llm:
        load = Load(llm)
        callers = [asyncio.create_task(load.call(caller)) for caller in range(args.concurrency)]

        async def phase(name: str, work: Awaitable[object]) -> None:
            started_s, tokens, finished = time.perf_counter(), load.num_tokens, load.num_finished
            await work
            seconds = time.perf_counter() - started_s
            rate = (load.num_tokens - tokens) / seconds
            rows.append([name, f"{seconds:.1f}", f"{rate:.0f}", load.num_finished - finished])

        await asyncio.sleep(2)
        await phase("one rank", asyncio.sleep(args.seconds))
        await phase("growing to three", asyncio.to_thread(llm.scale, 3))
        await phase("three ranks", asyncio.sleep(args.seconds))
        await phase("shrinking to one", asyncio.to_thread(llm.scale, 1))
        await phase("one rank", asyncio.sleep(args.seconds))
        load.is_over = True
        await asyncio.gather(*callers)
    print(table(rows))
    return load


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default=str(demo_model_path()), help="default: the bundled model")
    parser.add_argument("--concurrency", type=int, default=48)
    parser.add_argument("--seconds", type=float, default=8.0, help="duration of each steady phase")
    load = asyncio.run(run(parser.parse_args()))
    print(f"requests that failed: {len(load.errors)}")
    for error in load.errors[:3]:
        print(f"{type(error).__name__}: {error}")
    sys.exit(bool(load.errors))


if __name__ == "__main__":
    main()
