"""A load generator: a closed loop of streaming completions, or of embeddings, against an OpenAI-compatible server.

Prompts are random token ids, decoding is greedy, and end-of-sequence is ignored, so every answer has a fixed number of
tokens. `--streams` streams are kept running for `--seconds`; then the running ones may finish. Reports one JSON object:
see `_summary`. With `--pid`, it has that process's CPU time for each token, without its children's: `cpu_us_per_token`.
With `--inputs`, a stream is a sequence of requests for embeddings of so many prompts. The tokens are then the prompts',
and all of a request's arrive with the response.

    python benchmarks/stream_load.py URL MODEL --streams 64 --seconds 60
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from common import report

_FINISH_S = 300.0
"""Time for running streams to finish when `--seconds` are over."""

_LOWEST_ID = 3
"""Lower ids are special tokens in most vocabularies."""


@dataclass
class Stream:
    """One request, as its client sees it."""

    started_s: float
    event_times_s: list[float] = field(default_factory=list[float])
    """Arrival time of each event with text or a finish reason."""
    num_tokens: int = 0
    """The server's count, from the last event."""
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.event_times_s[0] - self.started_s

    @property
    def tpot_s(self) -> float:
        """Mean seconds per token after the first."""
        return (self.event_times_s[-1] - self.event_times_s[0]) / max(1, self.num_tokens - 1)

    def tokens_until(self, end_s: float) -> float:
        """Estimate of the tokens that had arrived by then. Assumes that all events hold equally many."""
        return self.num_tokens * sum(time_s <= end_s for time_s in self.event_times_s) / len(self.event_times_s)


def main() -> None:
    """Run the load and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("model", help="the served name")
    parser.add_argument("--streams", type=int, default=64, help="concurrent streams")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--inputs", type=int, default=0, help="inputs of a request for embeddings; 0: completions")
    parser.add_argument("--vocab-size", type=int, default=320, help="upper bound of the prompts' token ids")
    parser.add_argument("--pid", type=int, help="the server's process on this machine (Linux)")
    args = parser.parse_args()
    report(**asyncio.run(_load(args)))


async def _load(args: argparse.Namespace) -> dict[str, Any]:
    rnd = random.Random(1)
    streams: list[Stream] = []
    connector = aiohttp.TCPConnector(limit=0)
    cpu_s = 0.0 if args.pid is None else _cpu_s(args.pid)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        begun_s = time.perf_counter()
        end_s = begun_s + args.seconds

        async def run_one_by_one() -> None:
            while time.perf_counter() < end_s:
                prompts = [
                    [rnd.randrange(_LOWEST_ID, args.vocab_size) for _ in range(args.prompt_tokens)]
                    for _ in range(max(1, args.inputs))
                ]
                stream = Stream(time.perf_counter())
                streams.append(stream)
                if args.inputs:
                    await _embed(session, args, prompts, stream)
                else:
                    await _read_stream(session, args, prompts[0], stream)
                if stream.error is not None:
                    await asyncio.sleep(0.1)  # don't flood a server that refuses everything

        tasks = [asyncio.ensure_future(run_one_by_one()) for _ in range(args.streams)]
        _, late = await asyncio.wait(tasks, timeout=args.seconds + _FINISH_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    summary = _summary(streams, begun_s, end_s, args.inputs * args.prompt_tokens or args.new_tokens)
    if args.pid is not None:
        num_tokens = max(1, sum(stream.num_tokens for stream in streams))
        summary["cpu_us_per_token"] = 1e6 * (_cpu_s(args.pid) - cpu_s) / num_tokens
    return summary


def _cpu_s(pid: int) -> float:
    """Seconds of CPU time, in the program and in the kernel, of a process and those of its threads that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _read_stream(
    session: aiohttp.ClientSession, args: argparse.Namespace, prompt: list[int], stream: Stream
) -> None:
    body = {
        "model": args.model,
        "prompt": prompt,
        "max_tokens": args.new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    is_done = False
    try:
        async with session.post(f"{args.url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                stream.error = f"status {answer.status}: {(await answer.text())[:200]}"
                return
            async for line in answer.content:
                if line.startswith(b"data: [DONE]"):
                    is_done = True
                elif line.startswith(b"data: "):
                    _take(line[6:], stream)
    except (aiohttp.ClientError, OSError, ValueError) as error:
        stream.error = stream.error or f"{type(error).__name__}: {error}"
    if not is_done:
        stream.error = stream.error or "the stream ended without [DONE]"
    elif stream.num_tokens != args.new_tokens:
        stream.error = stream.error or f"{stream.num_tokens} tokens instead of {args.new_tokens}"


async def _embed(
    session: aiohttp.ClientSession, args: argparse.Namespace, prompts: list[list[int]], stream: Stream
) -> None:
    body = {"model": args.model, "input": prompts, "encoding_format": "float"}
    try:
        async with session.post(f"{args.url}/v1/embeddings", json=body) as answer:
            text = await answer.text()
            if answer.status != 200:
                stream.error = f"status {answer.status}: {text[:200]}"
                return
    except (aiohttp.ClientError, OSError) as error:
        stream.error = f"{type(error).__name__}: {error}"
        return
    stream.event_times_s.append(time.perf_counter())
    answered = json.loads(text)
    stream.num_tokens = answered["usage"]["prompt_tokens"]
    if len(answered["data"]) != len(prompts):
        stream.error = f"{len(answered['data'])} embeddings instead of {len(prompts)}"


def _take(data: bytes, stream: Stream) -> None:
    if b'"usage":{' in data or b'"usage": {' in data or b'"error"' in data:
        event = json.loads(data)
        if "error" in event:
            stream.error = str(event["error"])[:200]
        elif not event["choices"]:
            stream.num_tokens = event["usage"]["completion_tokens"]
            return
    stream.event_times_s.append(time.perf_counter())


def _summary(streams: list[Stream], begun_s: float, end_s: float, num_expected: int) -> dict[str, Any]:
    """The report: counts, tokens per second, and percentiles in milliseconds. `num_expected`: a request's tokens."""
    unfinished = [stream for stream in streams if stream.error is None and stream.num_tokens != num_expected]
    failed = [stream.error for stream in streams if stream.error is not None]
    failed += ["the stream didn't finish"] * len(unfinished)
    whole = [stream for stream in streams if stream.error is None and stream.num_tokens == num_expected]
    num_tokens = sum(stream.tokens_until(end_s) for stream in whole)
    return {
        "requests": len(whole),
        "errors": len(failed),
        "first_errors": failed[:3],
        "tokens_per_s": num_tokens / (end_s - begun_s),
        "ttft_ms": _percentiles([stream.ttft_s for stream in whole]),
        "tpot_ms": _percentiles([stream.tpot_s for stream in whole]),
    }


def _percentiles(seconds: list[float]) -> dict[str, float]:
    """p50 and p99, in milliseconds."""
    ordered = sorted(seconds)
    if not ordered:
        return {"p50": float("nan"), "p99": float("nan")}
    return {
        name: 1e3 * ordered[min(len(ordered) - 1, int(len(ordered) * q))] for name, q in (("p50", 0.5), ("p99", 0.99))
    }


if __name__ == "__main__":
    main()
