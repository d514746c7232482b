"""What an engine and its ranks are doing, as values that anyone may print, send or count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

RankState = Literal["starting", "serving", "restarting", "leaving", "gone"]

COLUMNS = ("rank", "state", "node", "pid", "GPUs", "running", "waiting", "KV %", "restarts")
"""Headings of a table of ranks."""

LEFT_ALIGNED = 3
"""So many columns are words, the others numbers."""

_NODE_DIGITS = 8
"""So many of a node id are shown, here and in messages."""


@dataclass(frozen=True)
class RankStatus:
    """One data-parallel rank, as its engine's program last heard of it."""

    dp_rank: int
    state: RankState
    """`restarting`: it has died, and another is to take its place. `leaving`: it finishes what it has, and stops.
    `gone`: it was given up, and the others go on without it."""
    node_ids: list[str]
    """The nodes of its processes, each once."""
    pid: int | None = None
    """Its engine's process; None while it has none."""
    gpu_ids: list[str] = field(default_factory=list[str])
    """The GPU of each of its workers, as their nodes number them; empty on CPUs."""
    num_running: int = 0
    num_waiting: int = 0
    """Requests that it has, and that haven't begun: for want of room, or because they are deferred."""
    kv_usage: float = 0.0
    """Share of its KV cache's blocks that running requests hold, 0 to 1."""
    num_restarts: int = 0
    """How often another process has taken its place, since it was added."""
    num_deferred: int = 0
    """Those of `num_waiting` that wait for their grammars to be compiled."""


@dataclass(frozen=True)
class EngineStatus:
    """An engine, as its own program sees it."""

    name: str
    model: str
    """The checkpoint's directory."""
    ranks: list[RankStatus]
    failure: str | None = None
    """Why it can't serve any more; None if it can."""


def describe_engine(status: EngineStatus) -> str:
    """A headline and the table of its ranks."""
    return f"engine {status.name}: {num_serving(status)}, model {status.model}\n{rank_table(status.ranks)}"


def num_serving(status: EngineStatus) -> str:
    """How many of the ranks serve, in words."""
    return f"{sum(rank.state == 'serving' for rank in status.ranks)} of {len(status.ranks)} ranks serving"


def rank_table(ranks: Sequence[RankStatus]) -> str:
    """A line for each rank, below a line of headings."""
    rows = [COLUMNS, *map(rank_cells, ranks)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(_line(row, widths) for row in rows)


def rank_cells(rank: RankStatus) -> tuple[str, ...]:
    """A rank's row: what is in each of the `COLUMNS`."""
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
