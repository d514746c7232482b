"""Programs that have an engine log its figures, each time since the last one: its counts say the same."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import NamedTuple

from raycore.llm import AsyncLLM
from raycore.metrics.counts import RankCounts
from raycore.system import time
from simulation.cluster.operations.contract import Capability, History, is_done
from simulation.cluster.records import Deed

_LOGGER = "raycore.metrics.throughput_log"
_ROUNDED = 0.051
"""By how much a number may differ that is logged with one decimal."""


class _Logged(NamedTuple):
    """What was said, and what was counted just before and after."""

    lines: list[str]
    before: dict[int, RankCounts]
    after: dict[int, RankCounts]
    began_s: float
    ended_s: float
    ranks: list[int]
    """Those that there were. Of others that have left, nothing is said."""


class _Lines(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.INFO)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


class LogStats(Capability):
    """See the module."""

    kinds = ("do_log_stats",)
    weight = 0  # only engines have it that are looked at in this way

    async def perform(self, llm: AsyncLLM, deed: Deed) -> None:
        lines: list[str] = []
        logger, handler = logging.getLogger(_LOGGER), _Lines(lines)
        before, began_s = llm.read_metrics().counts, time.monotonic()
        logger.addHandler(handler)
        try:
            await llm.do_log_stats()
        finally:
            logger.removeHandler(handler)
        ranks = [each.dp_rank for each in llm.ranks]
        deed.result = _Logged(lines, before, llm.read_metrics().counts, began_s, time.monotonic(), ranks)

    def problems(self, deed: Deed, history: History) -> Iterator[str]:
        done = [each for each in history.deeds if each.operation.kind == deed.operation.kind and is_done(each)]
        earlier = [each for each in done if each.began_s < deed.began_s]
        if deed in done and earlier:
            yield from _problems(max(earlier, key=lambda each: each.began_s).result, deed.result)


def _problems(last: _Logged, logged: _Logged) -> Iterator[str]:
    shortest_s, longest_s = logged.began_s - last.ended_s, logged.ended_s - last.began_s
    said = {int(line[7:10]): line for line in logged.lines}
    if len(said) < len(logged.lines):
        yield f"says several lines of a rank: {logged.lines}"
    for dp_rank, counts in logged.before.items():
        line, own = said.get(dp_rank, ""), last.after.get(dp_rank)
        if own is None or dp_rank not in logged.ranks:
            continue
        for name, what in (("num_output_tokens", "generation"), ("num_preemptions", "Preemptions")):
            least = getattr(counts, name) - getattr(own, name)
            most = getattr(logged.after[dp_rank], name) - getattr(last.before[dp_rank], name)
            found = re.search(rf"{what}[a-z ]*: ([\d.]+)", line)
            number = 0.0 if found is None else float(found[1])
            if what == "Preemptions":
                is_right = least <= number <= most
            else:
                is_right = least / longest_s - _ROUNDED <= number <= most / max(shortest_s, 1e-9) + _ROUNDED
            if not is_right:
                yield f"says {line!r} of dp_rank {dp_rank}, which has counted {least} to {most} {name} meanwhile"
