"""Prefill and decode ranks beside ranks that do both, with the same number of ranks: how long users wait for tokens.

Streams decode all the time. Meanwhile long prompts arrive, one after the other. Where a rank does both, each of them
delays the tokens of the streams on its rank. With `DisaggregationConnector`, the first ranks compute the long prompts,
and the streams are on the others.

    python benchmarks/disaggregation.py --model CHECKPOINT --dp 2 --prompt 1500

Reports the time to the first token of the long prompts, and the time for each further token of the streams, in
milliseconds. All ranks have the same number of threads in both engines.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from common import table

from raycore import AsyncLLM, SamplingParams
from raycore.demo import demo_model_path

Times = dict[str, list[float]]
"""By name: durations in seconds."""


def options_of(kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """The options of an engine of one kind."""
    if kind == "mixed":
        return {}
    extra = {"num_prefill_ranks": args.prefill_ranks, "min_prefill_tokens": args.prompt // 4}
    return {"kv_transfer_config": {"kv_connector": "DisaggregationConnector", "kv_connector_extra_config": extra}}


async def measure(kind: str, args: argparse.Namespace) -> Times:
    """The times of one engine."""
    engine = AsyncLLM(
        args.model,
        dtype=args.dtype,
        data_parallel_size=args.dp,
        num_threads=args.threads,
        max_model_len=args.prompt + args.new_tokens + args.stream_tokens,
        max_num_seqs=64,
        max_num_batched_tokens=args.batched_tokens,
        use_tqdm_on_load=False,
        **options_of(kind, args),
    )
    async with engine as llm:
        chance = random.Random(args.seed)
        vocab_size = llm.config.model.spec.vocab_size

        def prompt(count: int) -> dict[str, list[int]]:
            return {"prompt_token_ids": [chance.randrange(3, vocab_size) for _ in range(count)]}

        await run_prompt(llm, prompt(args.prompt), args.new_tokens, {})  # what is done once
        times: Times = {}
        is_over = asyncio.Event()
        streams = [asyncio.ensure_future(run_stream(llm, prompt, args, is_over, times)) for _ in range(args.streams)]
        await asyncio.sleep(args.warm_up_s)
        times.clear()
        await run_prompts(llm, [prompt(args.prompt) for _ in range(args.prompts)], args, times)
        is_over.set()
        await asyncio.gather(*streams)
        return times


async def run_prompts(llm: AsyncLLM, prompts: Sequence[Any], args: argparse.Namespace, times: Times) -> None:
    """Submit a long prompt every `interval_s` seconds, whatever becomes of those before."""
    tasks: list[asyncio.Task[None]] = []
    for each in prompts:
        tasks.append(asyncio.create_task(run_prompt(llm, each, args.new_tokens, times)))
        await asyncio.sleep(args.interval_s)
    await asyncio.gather(*tasks)


async def run_prompt(llm: AsyncLLM, prompt: Mapping[str, Any], num_tokens: int, times: Times) -> None:
    """Run one long prompt."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    began_s, first_s = time.monotonic(), 0.0
    async for _ in llm.generate(dict(prompt), params):
        first_s = first_s or time.monotonic()
    times.setdefault("first", []).append(first_s - began_s)
    times.setdefault("each of it", []).append((time.monotonic() - first_s) / max(1, num_tokens - 1))


async def run_stream(
    llm: AsyncLLM, prompt: Any, args: argparse.Namespace, is_over: asyncio.Event, times: Times
) -> None:
    """Run short prompts with long outputs, one after the other."""
    params = SamplingParams(temperature=0, max_tokens=args.stream_tokens, ignore_eos=True)
    while not is_over.is_set():
        before_s, num_before = 0.0, 0
        async for output in llm.generate(prompt(16), params):
            now_s, count = time.monotonic(), len(output.outputs[0].token_ids)
            if before_s:
                new = count - num_before
                times.setdefault("stream", []).extend([(now_s - before_s) / new] * new)
            before_s, num_before = now_s, count
            if is_over.is_set():
                break


def row(kind: str, args: argparse.Namespace, times: Times) -> list[object]:
    """A row of the table."""
    name = f"{args.dp} mixed" if kind == "mixed" else f"{args.prefill_ranks} + {args.dp - args.prefill_ranks}"
    cells: list[object] = [name]
    for part in ("first", "each of it", "stream"):
        found = 1000 * np.percentile(times[part], [50, 99])
        cells += [f"{value:.1f}" for value in found]
    return [*cells, len(times["stream"])]


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=demo_model_path())
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--dp", type=int, default=2, help="number of ranks of both engines")
    parser.add_argument("--prefill-ranks", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--prompt", type=int, default=1500, help="tokens of a long prompt")
    parser.add_argument("--new-tokens", type=int, default=16, help="tokens of the output of a long prompt")
    parser.add_argument("--prompts", type=int, default=12, help="number of long prompts")
    parser.add_argument("--interval-s", type=float, default=3.0, help="between two long prompts")
    parser.add_argument("--streams", type=int, default=4, help="number of streams at the same time")
    parser.add_argument("--stream-tokens", type=int, default=200)
    parser.add_argument("--batched-tokens", type=int, default=2048, help="max_num_batched_tokens")
    parser.add_argument("--warm-up-s", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ.setdefault("RAY_worker_niceness", "0")
    rows: list[list[object]] = [
        ["ranks", "TTFT p50", "p99", "its TPOT p50", "p99", "streams' TPOT p50", "p99", "their tokens"]
    ]
    rows += [row(kind, args, asyncio.run(measure(kind, args))) for kind in ("mixed", "disaggregated")]
    print(table(rows), flush=True)


if __name__ == "__main__":
    main()
