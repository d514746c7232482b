"""The status of an engine and its ranks, as values to print, send or export."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

RankState = Literal["starting", "serving", "restarting", "leaving", "gone"]

COLUMNS = ("rank", "state", "node", "pid", "GPUs", "running", "waiting", "KV %", "restarts")
"""Headings of a table of ranks."""

LEFT_ALIGNED = 3
"""Number of columns with text. The others hold numbers."""

_NODE_DIGITS = 8
"""Digits of a node id to show."""


@dataclass(frozen=True)
class RankStatus:
    """The status of a data-parallel rank, as last received by the driver."""

    dp_rank: int
    state: RankState
    """`restarting`: it was lost and is being replaced. `leaving`: it finishes its requests, then stops. `gone`: it was
    given up, and the engine continues without it."""
    node_ids: list[str]
    """The nodes of its processes, without duplicates."""
    pid: int | None = None
    """Its engine process; None while there is none."""
    gpu_ids: list[str] = field(default_factory=list[str])
    """The GPU of each worker, as numbered on its node; empty on CPUs."""
    num_running: int = 0
    num_waiting: int = 0
    """Requests that haven't started: they wait for room, or are deferred."""
    kv_usage: float = 0.0
    """Share of the KV cache's blocks that running requests hold, 0 to 1."""
    num_restarts: int = 0
    """Times that it was replaced since it was added."""
    num_deferred: int = 0
    """Requests among `num_waiting` that wait for their grammars to be compiled."""


@dataclass(frozen=True)
class EngineStatus:
    """The status of an engine, as its driver sees it."""

    name: str
    model: str
    """The checkpoint's directory."""
    ranks: list[RankStatus]
    failure: str | None = None
    """Why it can no longer serve; None if it can."""


def describe_engine(status: EngineStatus) -> str:
    """A headline and the table of its ranks."""
    return f"engine {status.name}: {num_serving(status)}, model {status.model}\n{rank_table(status.ranks)}"


def num_serving(status: EngineStatus) -> str:
    """For example `2 of 3 ranks serving`."""
    return f"{sum(rank.state == 'serving' for rank in status.ranks)} of {len(status.ranks)} ranks serving"


def rank_table(ranks: Sequence[RankStatus]) -> str:
    """A table with one line per rank, below a line of headings."""
    rows = [COLUMNS, *map(rank_cells, ranks)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(_line(row, widths) for row in rows)


def rank_cells(rank: RankStatus) -> tuple[str, ...]:
    """A rank's row: one cell for each of the `COLUMNS`."""
    return (
        f"dp{rank.dp_rank}",
        rank.state,
        ",".join(node_id[:_NODE_DIGITS] for node_id in rank.node_ids),
        "-" if rank.pid is None else str(rank.pid),
        ",".join(rank.gpu_ids) or "-",
        str(rank.num_running),
        str(rank.num_waiting),
        f"{100 * rank.kv_usage:.1f}",
        str(rank.num_restarts),
    )


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(
        cell.ljust(width) if column < LEFT_ALIGNED else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
