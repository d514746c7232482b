"""What LoRA adapters cost: the tokens per second of a batch with many, and the delay of steps while one is loaded.

The first table has output tokens per second of a batch in which each request has an adapter of its own, beside those of
an engine without `enable_lora`, and of an engine with it whose requests have no adapters. The engines take turns, round
by round, on the same prompts. The table has medians, and medians of the rounds' ratios to the first engine.

For the second table, streams without adapters run in one engine. In turn, nothing happens for a while, and then an
adapter is loaded by `add_lora()` and removed. A gap is the time between two outputs of a stream. The delay of a load
is the largest gap during it, minus the median gap while nothing was loaded. The same for stretches of time of the same
length in which nothing was loaded says how much other things on the machine delay steps. Gaps in which another stream
began aren't counted: its prompt delays the others. Adapters have been written just before, so their files are in
memory.

    python benchmarks/lora.py [CHECKPOINT]              default: the bundled model

The exit status is 1 if an adapter has delayed a stream by more than `--max-delay-ms`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from adapters import write_adapters
from common import median, table

from raycore import LLM, AsyncLLM, LoRARequest, SamplingParams
from raycore.demo import demo_model_path

PROMPT_LENGTH = 32
Times = list[list[float]]
"""For each stream that has begun: when it was asked for, and when its outputs came, in seconds."""


def random_prompts(seed: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A batch of prompts."""
    rnd = random.Random(seed)
    vocab_size = json.loads((Path(args.checkpoint) / "config.json").read_text())["vocab_size"]
    ids = [[rnd.randrange(10, vocab_size) for _ in range(PROMPT_LENGTH)] for _ in range(args.batch)]
    return [{"prompt_token_ids": each} for each in ids]


def engine_options(args: argparse.Namespace, num_tokens: int, num_adapters: int) -> dict[str, Any]:
    """Options of an engine with room for so many adapters, for requests with so many tokens."""
    options: dict[str, Any] = {"model": args.checkpoint, "dtype": args.dtype, "max_num_seqs": max(64, args.batch)}
    options |= {"max_model_len": PROMPT_LENGTH + num_tokens, "enable_prefix_caching": False, "standby_delay_s": None}
    if num_adapters:
        options |= {"enable_lora": True, "max_loras": num_adapters, "max_lora_rank": args.rank}
    return options | {"use_tqdm_on_load": False}


# ---- tokens per second


def compare_rates(adapters: Sequence[LoRARequest], args: argparse.Namespace) -> None:
    """Print the first table."""
    params = SamplingParams(temperature=0, max_tokens=args.num_tokens, ignore_eos=True)
    kinds = {"no enable_lora": None, "requests without adapters": None, f"{len(adapters)} adapters": list(adapters)}
    rates: dict[str, list[float]] = {name: [] for name in kinds}
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(LLM(**engine_options(args, args.num_tokens, number and len(adapters))))
            for number, name in enumerate(kinds)
        }
        for adapter in adapters:
            engines[list(kinds)[-1]].add_lora(adapter)
        for turn in range(1 + args.rounds):
            prompts = random_prompts(f"rates {turn}", args)
            in_turn = list(kinds)[turn % len(kinds) :] + list(kinds)[: turn % len(kinds)]
            for name in in_turn:
                begun_s = time.perf_counter()
                engines[name].generate(prompts, params, use_tqdm=False, lora_request=kinds[name])
                if turn:  # the first one warms up
                    rates[name].append(args.batch * args.num_tokens / (time.perf_counter() - begun_s))
    first = next(iter(rates.values()))
    rows: list[list[object]] = [[f"batch of {args.batch}", "tokens/s", "ratio"]]
    for name, of_engine in rates.items():
        ratio = median([own / other for own, other in zip(of_engine, first, strict=True)])
        rows.append([name, f"{median(of_engine):.1f}", f"{ratio:.3f}"])
    print(f"\nadapters of rank {args.rank}, {args.num_tokens} tokens for each request, medians of {args.rounds} rounds")
    print(table(rows), flush=True)


# ---- delays


async def measure_gaps(adapters: Sequence[LoRARequest], args: argparse.Namespace) -> bool:
    """Print the second table. Returns whether no adapter has delayed a stream for too long."""
    options = engine_options(args, args.stream_tokens, 1)
    async with await AsyncLLM.create(**options) as llm:
        times: Times = []
        streams = [
            asyncio.ensure_future(read_stream(llm, prompt, times, args)) for prompt in random_prompts("gaps", args)
        ]
        while not (len(times) >= args.batch and all(len(own) > 1 for own in times)):  # until all have begun
            await asyncio.sleep(0.01)
        loads, rests = await load_in_turn(llm, adapters, args)
        for stream in streams:
            stream.cancel()
        results = await asyncio.gather(*streams, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result
    usual_s = median([gap_s for rest in rests for gap_s in gaps_in(times, rest)])
    loading = [max(gaps) - usual_s for load in loads if (gaps := gaps_in(times, load))]
    # as many stretches, and as long, in which nothing happened
    alike = [max(gaps) - usual_s for each in stretches(rests, loads) if (gaps := gaps_in(times, each))]
    rows: list[list[object]] = [["delay of a stream, ms", "number", "median", "largest"]]
    for name, delays_s in (("adapter loaded", loading), ("nothing loaded", alike)):
        number = len(delays_s)
        rows.append([name, number, f"{1000 * median(delays_s):.2f}", f"{1000 * max(delays_s):.2f}"])
    took_ms = 1000 * median([end_s - begin_s for begin_s, end_s in loads])
    print(f"\n{args.batch} streams, median gap {1000 * usual_s:.2f} ms; add_lora() takes {took_ms:.1f} ms (median)")
    print(table(rows))
    print(f"largest additional delay: {1000 * max(loading):.2f} ms (at most {args.max_delay_ms:g})", flush=True)
    return 1000 * max(loading) <= args.max_delay_ms


async def read_stream(llm: AsyncLLM, prompt: dict[str, Any], times: Times, args: argparse.Namespace) -> None:
    """Note when a stream's outputs come. When it has ended, it begins again, as another stream."""
    params = SamplingParams(temperature=0, max_tokens=args.stream_tokens, ignore_eos=True)
    while True:
        own = [time.perf_counter()]
        times.append(own)
        async for _ in llm.generate(prompt, params):
            own.append(time.perf_counter())  # noqa: PERF401 - the streams are read while they run


async def load_in_turn(
    llm: AsyncLLM, adapters: Sequence[LoRARequest], args: argparse.Namespace
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Load adapters, one after the other, and rest before each. Returns (begin, end) of the loads, and of the rests."""
    loads: list[tuple[float, float]] = []
    rests: list[tuple[float, float]] = []
    for adapter in itertools.islice(itertools.cycle(adapters), args.loads):
        begin_s = time.perf_counter()
        await asyncio.sleep(args.rest_s)
        middle_s = time.perf_counter()
        await llm.add_lora(adapter)
        rests.append((begin_s, middle_s))
        loads.append((middle_s, time.perf_counter()))
        await llm.remove_lora(adapter.lora_int_id)
    await asyncio.sleep(args.rest_s)
    return loads, rests


def gaps_in(times: Times, stretch: tuple[float, float]) -> list[float]:
    """The gaps of all streams that a stretch of time has a part in, without those in which a stream began."""
    begin_s, end_s = stretch
    beginnings = [(own[0], own[1]) for own in times if len(own) > 1]
    pairs = [
        (before_s, after_s)
        for own in times
        for before_s, after_s in itertools.pairwise(own[1:])
        if after_s > begin_s and before_s < end_s
    ]
    return [
        after_s - before_s
        for before_s, after_s in pairs
        if not any(asked_s < after_s and first_s > before_s for asked_s, first_s in beginnings)
    ]


def stretches(
    rests: Sequence[tuple[float, float]], loads: Sequence[tuple[float, float]]
) -> Iterator[tuple[float, float]]:
    """For each load, a stretch in the middle of the rest before it that is as long, if the rest is long enough."""
    for (rest_s, rest_end_s), (begin_s, end_s) in zip(rests, loads, strict=True):
        middle_s, half_s = (rest_s + rest_end_s) / 2, min(end_s - begin_s, rest_end_s - rest_s) / 2
        yield middle_s - half_s, middle_s + half_s


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", metavar="CHECKPOINT", default=str(demo_model_path()))
    parser.add_argument("--adapters", type=int, default=16, help="in the batch, one for each request")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--num-tokens", type=int, default=128, help="generated for each request of the first part")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--stream-tokens", type=int, default=400, help="generated for each stream of the second part")
    parser.add_argument("--loads", type=int, default=40, help="adapters that are loaded while streams run")
    parser.add_argument("--rest-s", type=float, default=0.5, help="before each of them")
    parser.add_argument("--max-delay-ms", type=float, default=50.0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="adapters-") as directory:
        adapters = write_adapters(args.checkpoint, Path(directory), args.adapters, args.rank)
        compare_rates([adapters[index % len(adapters)] for index in range(args.batch)], args)
        is_good = asyncio.run(measure_gaps(adapters, args))
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
