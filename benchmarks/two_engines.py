"""Prefill and decode in two engines behind the examples' proxy, beside one engine whose ranks do both.

    python benchmarks/two_engines.py --model CHECKPOINT --requests 1000 --kills 4

Both have two ranks in all, each with a thread, and answer streamed completions over HTTP, to prompts of 500 to 2,000
tokens. Then the same requests run again while ranks of both engines are killed in turn. Greedy tokens are compared with
those of the one engine. Reports the time to the first token and the time for each further one, in milliseconds, and how
many requests were lost or changed.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web
from common import table

from raycore import AsyncLLM
from raycore.server import ServerOptions, build_app

PROXY = Path(__file__).parents[1] / "examples" / "prefill_decode_proxy.py"


class Times:
    """What one run has taken, and its tokens."""

    def __init__(self) -> None:
        self.first_s: list[float] = []
        self.each_s: list[float] = []
        self.tokens: dict[int, list[int]] = {}


def engine(args: argparse.Namespace, num_ranks: int, transfer: dict[str, Any] | None = None) -> AsyncLLM:
    """Create an engine."""
    return AsyncLLM(
        args.model,
        dtype=args.dtype,
        data_parallel_size=num_ranks,
        num_threads=args.threads,
        max_model_len=args.longest + args.new_tokens,
        batch_invariant=True,
        use_tqdm_on_load=False,
        kv_transfer_config=transfer,
    )


@asynccontextmanager
async def served(llm: AsyncLLM) -> AsyncIterator[str]:
    """Serve an engine's API. Yields its URL."""
    app = build_app(llm, ServerOptions(("model",)))
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    await serving


@asynccontextmanager
async def proxied(prefill: str, decode: str) -> AsyncIterator[str]:
    """Run the proxy. Yields its URL."""
    spec = importlib.util.spec_from_file_location("prefill_decode_proxy", PROXY)
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    runner = web.AppRunner(module.Proxy([prefill], [decode]).app(), handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def ask(session: ClientSession, url: str, prompt: Sequence[int], args: argparse.Namespace, times: Times) -> None:
    """Stream one completion. One that fails has no tokens."""
    number = len(times.tokens)
    tokens = times.tokens.setdefault(number, [])
    body = {"prompt": prompt, "max_tokens": args.new_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    began_s, first_s = time.monotonic(), 0.0
    try:
        async with session.post(f"{url}/v1/completions", json=body | {"return_token_ids": True}) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {") and (new := json.loads(line[6:]).get("choices")):
                    first_s = first_s or time.monotonic()
                    tokens += new[0]["token_ids"]
    except ClientError as error:
        print(f"request {number}: {error}", flush=True)
        return
    times.first_s.append(first_s - began_s)
    times.each_s.append((time.monotonic() - first_s) / max(1, len(tokens) - 1))


async def run(url: str, prompts: Sequence[Sequence[int]], args: argparse.Namespace) -> Times:
    """Run all requests, `args.at_a_time` at a time, in order."""
    times, places = Times(), asyncio.Semaphore(args.at_a_time)
    tasks: list[asyncio.Task[None]] = []
    async with ClientSession(connector=TCPConnector(limit=0), timeout=ClientTimeout(total=600)) as session:
        for prompt in prompts:
            await places.acquire()
            tasks.append(asyncio.create_task(ask(session, url, prompt, args, times)))
            tasks[-1].add_done_callback(lambda _: places.release())
            await asyncio.sleep(0)  # until it has its number
        await asyncio.gather(*tasks)
    return times


async def kill(engines: Sequence[AsyncLLM], expected_s: float, count: int) -> None:
    """Kill a rank of each engine in turn, `count` times within the expected time."""
    for index in range(count):
        await asyncio.sleep(expected_s / (count + 1))
        os.kill(engines[index % len(engines)].engine_infos[0].pid, signal.SIGKILL)


async def measure(args: argparse.Namespace) -> None:
    """Run both deployments, and print the table."""
    chance = random.Random(args.seed)
    lengths = [chance.randint(args.shortest, args.longest) for _ in range(args.requests)]
    prompts = [[chance.randrange(10, 90) for _ in range(length)] for length in lengths]
    rows: list[list[object]] = [["engines", "TTFT p50", "p99", "TPOT p50", "p99", "lost", "changed"]]

    def report(name: str, times: Times, expected: Times) -> None:
        found = [1000 * np.percentile(part, [50, 99]) for part in (times.first_s, times.each_s)]
        lost = sum(len(tokens) < args.new_tokens for tokens in times.tokens.values())
        pairs = ((tokens, expected.tokens[number]) for number, tokens in times.tokens.items())
        changed = sum(tokens != other[: len(tokens)] for tokens, other in pairs)
        rows.append([name, *(f"{value:.1f}" for pair in found for value in pair), lost, changed])

    async with engine(args, 2) as one, served(one) as url:
        expected = await run(url, prompts, args)
    report("one, mixed ranks", expected, expected)
    with tempfile.NamedTemporaryFile("w") as secret:
        secret.write(os.urandom(16).hex())
        secret.flush()
        extra = {"secret_file": secret.name}
        transfers = [
            {"kv_connector": "DisaggregationConnector", "kv_role": role, "kv_connector_extra_config": extra}
            for role in ("kv_producer", "kv_consumer")
        ]
        async with AsyncExitStack() as stack:
            engines = [await stack.enter_async_context(engine(args, 1, each)) for each in transfers]
            urls = [await stack.enter_async_context(served(each)) for each in engines]
            url = await stack.enter_async_context(proxied(*urls))
            began_s = time.monotonic()
            report("two and a proxy", await run(url, prompts, args), expected)
            for each in engines:
                await each.reset_prefix_cache()
            killing = asyncio.create_task(kill(engines, time.monotonic() - began_s, args.kills))
            report(f"the same, {args.kills} kills", await run(url, prompts, args), expected)
            await killing
    print(table(rows), flush=True)


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--shortest", type=int, default=500, help="tokens of a prompt, at least")
    parser.add_argument("--longest", type=int, default=2000, help="and at most")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--at-a-time", type=int, default=8, help="requests at the same time")
    parser.add_argument("--kills", type=int, default=4, help="killed ranks, of both engines in turn")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ.setdefault("RAY_worker_niceness", "0")
    asyncio.run(measure(args))


if __name__ == "__main__":
    main()
