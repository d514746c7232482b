"""What a benchmark of a server measured: numbers under vLLM's names, and a table of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from raycore.cli.bench.client import RequestResult

METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client Queue Time"),
    "e2el_including_client_queue": ("E2EL incl. Queue", "End-to-end Latency incl. Client Queue"),
}
"""The metrics of latency: the name and the heading of each."""

GOALS = ("ttft", "tpot", "e2el")
"""The metrics that goodput may have limits for."""

DETAILS = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors")
"""Values of each request, which are saved only if that is asked for."""

_WIDTH = 50


def tpot_s(result: RequestResult, num_tokens: int) -> float:
    """Mean seconds per token after the first; 0 if there is only one."""
    return (result.latency - result.ttft) / (num_tokens - 1) if num_tokens > 1 else 0.0


def measured(
    results: Sequence[RequestResult],
    duration_s: float,
    *,
    percentiles: Sequence[float],
    selected: Sequence[str],
    goals_ms: Mapping[str, float],
    count_tokens: Callable[[str], int],
    is_pooling: bool,
) -> dict[str, Any]:
    """The numbers of a benchmark, by vLLM's names.

    Args:
        percentiles: those of each selected metric, from 0 to 100.
        selected: keys of `METRICS`.
        goals_ms: the longest times of a request that counts for goodput, by metric. Empty: there is no goodput.
        count_tokens: counts an answer's tokens, if the server didn't.
    """
    done = [each for each in results if each.is_success]
    lengths = [(each.output_tokens or count_tokens(each.text)) if each.is_success else 0 for each in results]
    done_lengths = [length for each, length in zip(results, lengths, strict=True) if each.is_success]
    num_input, num_output = sum(each.prompt_len for each in done), sum(lengths)
    found: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(results) - len(done),
        "total_input_tokens": num_input,
        "request_throughput": len(done) / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        "input_lens": [each.prompt_len for each in results],
        "latencies": [each.latency for each in results],
        "queue_times": [each.queue_time for each in results],
        "errors": [each.error for each in results],
    }
    if is_pooling:
        found |= {"total_input_sequences": len(done), "input_sequence_throughput": len(done) / duration_s}
    else:
        tpots = [tpot_s(each, length) for each, length in zip(done, done_lengths, strict=True)]
        num_good = _num_good(done, tpots, goals_ms)
        found |= {
            "total_output_tokens": num_output,
            "output_throughput": num_output / duration_s,
            "request_goodput": num_good / duration_s if goals_ms else None,
            "output_lens": lengths,
            "ttfts": [each.ttft for each in results],
            "itls": [each.itl for each in results],
            "start_times": [each.start_time for each in results],
            "generated_texts": [each.text for each in results],
            "rtfx": 0.0,  # of audio, which there is none of
            **_peaks(done),
        }
    times = {
        "ttft": [each.ttft for each in done],
        "tpot": [tpot_s(each, length) for each, length in zip(done, done_lengths, strict=True) if length > 1],
        "itl": [gap for each in done for gap in each.itl],
        "e2el": [each.latency for each in done],
        "client_queue_time": [each.queue_time for each in done],
        "e2el_including_client_queue": [each.latency + each.queue_time for each in done],
    }
    for name in selected:
        found |= _of_metric(name, times[name], percentiles)
    return found


def _num_good(done: Sequence[RequestResult], tpots: Sequence[float], goals_ms: Mapping[str, float]) -> int:
    return sum(
        all(
            1e3 * seconds <= goals_ms.get(name, math.inf)
            for name, seconds in (("ttft", each.ttft), ("tpot", tpot), ("e2el", each.latency))
        )
        for each, tpot in zip(done, tpots, strict=True)
    )


def _peaks(done: Sequence[RequestResult]) -> dict[str, float]:
    """The most tokens, and the most running requests, of any second."""
    if not done:
        return {"max_output_tokens_per_s": 0.0, "max_concurrent_requests": 0}
    begun_s = min(each.start_time for each in done)
    tokens: dict[int, int] = {}
    running: dict[int, int] = {}
    for each in done:
        first_s = each.start_time - begun_s
        for time_s in np.cumsum([first_s + each.ttft, *each.itl]):
            tokens[int(time_s)] = tokens.get(int(time_s), 0) + 1
        for second in range(int(first_s), int(first_s + each.latency) + 1):
            running[second] = running.get(second, 0) + 1
    return {
        "max_output_tokens_per_s": float(max(tokens.values())),
        "max_concurrent_requests": max(running.values()),
    }


def _of_metric(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    times_ms = 1e3 * np.array(seconds or [0.0])
    found = {
        f"mean_{name}_ms": float(times_ms.mean()),
        f"median_{name}_ms": float(np.median(times_ms)),
        f"std_{name}_ms": float(times_ms.std()),
    }
    return found | {f"p{each:g}_{name}_ms": float(np.percentile(times_ms, each)) for each in percentiles}


def table(
    found: Mapping[str, Any],
    percentiles: Sequence[float],
    selected: Sequence[str],
    max_concurrency: int | None,
    rate: float,
) -> str:
    """The numbers as a table, with vLLM's headings."""
    lines = [f"{' Serving Benchmark Result ':=^{_WIDTH}}"]

    def add(heading: str, value: float | None, digits: int = 2) -> None:
        if value is not None:
            lines.append(f"{heading:<40} {f'{value:.{digits}f}':<10}")

    add("Successful requests:", found["completed"], 0)
    add("Failed requests:", found["failed"], 0)
    add("Maximum request concurrency:", max_concurrency, 0)
    if not math.isinf(rate):
        add("Request rate configured (RPS):", rate)
    add("Benchmark duration (s):", found["duration"])
    add("Total input tokens:", found["total_input_tokens"], 0)
    add("Total generated tokens:", found.get("total_output_tokens"), 0)
    add("Request throughput (req/s):", found["request_throughput"])
    add("Request goodput (req/s):", found.get("request_goodput"))
    add("Output token throughput (tok/s):", found.get("output_throughput"))
    add("Peak output token throughput (tok/s):", found.get("max_output_tokens_per_s"))
    add("Peak concurrent requests:", found.get("max_concurrent_requests"))
    add("Total token throughput (tok/s):", found["total_token_throughput"])
    for name in selected:
        short, heading = METRICS[name]
        lines.append(f"{heading:-^{_WIDTH}}")
        add(f"Mean {short} (ms):", found[f"mean_{name}_ms"])
        add(f"Median {short} (ms):", found[f"median_{name}_ms"])
        for each in percentiles:
            add(f"P{each:g} {short} (ms):", found[f"p{each:g}_{name}_ms"])
    return "\n".join([*lines, "=" * _WIDTH])
