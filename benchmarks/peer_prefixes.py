"""Time to the first token of a prompt whose prefix is on the rank itself, on another rank, or nowhere.

    python benchmarks/peer_prefixes.py --model CHECKPOINT --prefix 1500

For each place, the median over several prompts, in milliseconds. The last rows say what `PeersConnector` does by
itself, from what reading and computing have taken before.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from collections.abc import Callable
from typing import Any

from common import median, table

from raycore import AsyncLLM, SamplingParams
from raycore.demo import demo_model_path
from raycore.parts.transfers.worker import WorkerTransfers

TOLD_S = 1.5
"""After so many seconds without requests, a client knows what a rank's cache holds."""
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)


async def first_token_s(llm: AsyncLLM, tokens: list[int], rank: int) -> float:
    """How long a rank takes."""
    began_s = time.monotonic()
    async for _ in llm.generate({"prompt_token_ids": tokens}, ONE_TOKEN, data_parallel_rank=rank):
        pass
    return time.monotonic() - began_s


def engine(args: argparse.Namespace, *, compares_costs: bool) -> AsyncLLM:
    """Two ranks."""
    extra = {"compare_costs": compares_costs, "min_fetch_tokens": 16}
    return AsyncLLM(
        args.model,
        dtype=args.dtype,
        data_parallel_size=2,
        num_threads=args.threads,
        max_model_len=args.prefix + 64,
        kv_transfer_config={"kv_connector": "PeersConnector", "kv_connector_extra_config": extra},
        use_tqdm_on_load=False,
    )


async def measure(llm: AsyncLLM, args: argparse.Namespace, prompt: Callable[[], list[int]]) -> dict[str, list[float]]:
    """Seconds, by where the prefix is."""
    times: dict[str, list[float]] = {"nowhere": [], "on another rank": [], "on the rank itself": []}
    await first_token_s(llm, prompt(), 1)  # what is done once
    for _ in range(args.repeats):
        tokens = prompt()
        times["nowhere"].append(await first_token_s(llm, tokens, 0))
        await asyncio.sleep(TOLD_S)
        times["on another rank"].append(await first_token_s(llm, [*tokens[:-1], 5], 1))
        times["on the rank itself"].append(await first_token_s(llm, [*tokens[:-1], 6], 1))
    return times


async def run(args: argparse.Namespace) -> list[list[object]]:
    """The rows of the table."""
    chance = random.Random(args.seed)
    rows: list[list[object]] = [["prefix", "ms"]]

    async with engine(args, compares_costs=False) as llm:
        size = llm.config.model.spec.vocab_size

        def prompt() -> list[int]:
            return [chance.randrange(10, size) for _ in range(args.prefix + 1)]

        for place, times_s in (await measure(llm, args, prompt)).items():
            rows.append([place, f"{1000 * median(times_s):.1f}"])
        rows.append(["MB read for a prefix", await megabytes(llm, args)])
    async with engine(args, compares_costs=True) as llm:
        times = await measure(llm, args, prompt)
        read = sum(each.get("fetches", 0) for each in await llm.collective_rpc(counts_of))
        rows.append(["on another rank, by costs", f"{1000 * median(times['on another rank']):.1f}"])
        rows.append(["of these, read", f"{read} of {args.repeats}"])
    return rows


async def megabytes(llm: AsyncLLM, args: argparse.Namespace) -> str:
    """How much a prefix takes."""

    # nested functions are pickled by value
    def block_bytes(worker: Any) -> int:
        return worker._parts[WorkerTransfers].connector._block_bytes

    return f"{(await llm.collective_rpc(block_bytes))[0] * (args.prefix // llm.engine_infos[0].block_size) / 1e6:.1f}"


def counts_of(worker: Any) -> dict[str, int]:
    """What a worker has read."""
    return dict(worker._parts[WorkerTransfers].connector.counts)


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=demo_model_path())
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prefix", type=int, default=1500, help="number of tokens")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ.setdefault("RAY_worker_niceness", "0")
    print(table(asyncio.run(run(args))), flush=True)


if __name__ == "__main__":
    main()
