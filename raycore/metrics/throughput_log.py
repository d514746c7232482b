"""Logs each rank's throughput every few seconds while it has work."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager

from raycore.metrics.counts import RankCounts
from raycore.metrics.periodic import Periodic
from raycore.metrics.view import MetricsView
from raycore.status import RankStatus, decode_speed
from raycore.system import time

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0


@contextmanager
def throughput_logged(read: Callable[[], MetricsView], is_wanted: bool = True) -> Generator[None, None, None]:
    """While the block runs, log the ranks' throughput every 10 s. Does nothing if `is_wanted` is False."""
    periodic = Periodic("raycore-throughput-log", INTERVAL_S, ThroughputLog(read).report)
    if is_wanted:
        periodic.start()
    try:
        yield
    finally:
        periodic.stop()


class ThroughputLog:
    """Logs the throughput of each rank since the previous report. The lines have vLLM's format."""

    def __init__(self, read: Callable[[], MetricsView], clock: Callable[[], float] = time.monotonic) -> None:
        self._read = read
        self._clock = clock
        self._last_s = clock()
        self._before: dict[int, RankCounts] = {}
        self._busy: set[int] = set()
        """Ranks that had work at the last report. A rank that becomes idle gets one more line."""
        self._hit_rates: dict[int, float] = {}

    def report(self) -> None:
        """Log a line for each rank that had work since the last report."""
        now_s = self._clock()
        elapsed_s, self._last_s = now_s - self._last_s, now_s
        view = self._read()
        for rank in view.ranks:
            counts = view.counts.get(rank.dp_rank)
            if counts is not None:
                self._report_rank(rank, counts, elapsed_s)
        self._before = view.counts

    def _report_rank(self, rank: RankStatus, counts: RankCounts, elapsed_s: float) -> None:
        before = self._before.get(rank.dp_rank)
        num_prompt = _num_computed(counts) - (_num_computed(before) if before else 0)
        num_output = counts.num_output_tokens - (before.num_output_tokens if before else 0)
        num_preempted = counts.num_preemptions - (before.num_preemptions if before else 0)
        is_busy = bool(num_prompt or num_output or rank.num_running or rank.num_waiting)
        if not is_busy and rank.dp_rank not in self._busy:
            return
        (self._busy.add if is_busy else self._busy.discard)(rank.dp_rank)
        parts = [
            f"Avg prompt throughput: {num_prompt / elapsed_s:.1f} tokens/s",
            f"Avg generation throughput: {num_output / elapsed_s:.1f} tokens/s",
            f"Running: {rank.num_running} reqs",
            f"Waiting: {rank.num_waiting} reqs",
        ]
        if num_preempted:
            parts.append(f"Preemptions: {num_preempted}")
        parts.append(f"KV cache usage: {100 * rank.kv_usage:.1f}%")
        hit_rate = self._hit_rate(rank.dp_rank, counts, before)
        if hit_rate is not None:
            parts.append(f"Prefix cache hit rate: {100 * hit_rate:.1f}%")
        num_drafted = counts.num_draft_tokens - (before.num_draft_tokens if before else 0)
        if num_drafted:
            num_accepted = counts.num_accepted_tokens - (before.num_accepted_tokens if before else 0)
            parts.append(f"Avg draft acceptance rate: {100 * num_accepted / num_drafted:.1f}%")
        if num_output and rank.decode_rate:
            parts.append(f"Weights that decodes read: {decode_speed(rank)}")
        logger.info("Engine %03d: %s", rank.dp_rank, ", ".join(parts))

    def _hit_rate(self, dp_rank: int, counts: RankCounts, before: RankCounts | None) -> float | None:
        """Prefix cache hit rate in the latest interval that had lookups; None before the first lookup."""
        num_queries = counts.num_prefix_queries - (before.num_prefix_queries if before else 0)
        if num_queries:
            num_hits = counts.num_prefix_hits - (before.num_prefix_hits if before else 0)
            self._hit_rates[dp_rank] = num_hits / num_queries
        return self._hit_rates.get(dp_rank)


def _num_computed(counts: RankCounts) -> int:
    return counts.num_prompt_tokens - counts.num_cached_prompt_tokens
