"""The status of an engine and its ranks, as values to print, send or export."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

RankState = Literal["starting", "serving", "paused", "asleep", "stale", "restarting", "unplaced", "leaving", "gone"]

UP_STATES: tuple[RankState, ...] = ("serving", "paused", "asleep", "stale", "leaving")
"""The states in which a rank has processes that have started."""

COLUMNS = ("rank", "state", "node", "backend", "pid", "GPUs", "running", "waiting", "KV %", "restarts")
"""Column headings of a table of ranks."""

LEFT_ALIGNED = 4
"""How many of the columns, from the left, are left-aligned. The others are right-aligned."""

_NODE_DIGITS = 8
"""How many digits of a node id are shown."""


@dataclass(frozen=True)
class RankStatus:
    """The status of a data-parallel rank, as last known to the driver: the program that created the engine."""

    dp_rank: int
    state: RankState
    """`starting`: not up yet. `serving`: takes requests. `paused`: up, but requests wait. `asleep`: paused, and has
    given up memory. `stale`: up, but out of service until an update brings it all weights. `restarting`: was lost and
    is being replaced. `unplaced`: was lost, and is replaced once a node has room for it. `leaving`: finishes its
    requests, then stops. `gone`: was given up, and the engine continues without this rank."""
    node_ids: list[str]
    """The ids of the nodes on which the rank's processes run, without duplicates. Empty while it is `unplaced`."""
    pid: int | None = None
    """Process id of the rank's engine; None unless the rank's state is one of `UP_STATES`."""
    gpu_ids: list[str] = field(default_factory=list[str])
    """The GPU of each worker, as numbered on its node; empty on CPUs."""
    num_running: int = 0
    num_waiting: int = 0
    """Requests that wait for a slot or for blocks of the KV cache, or for something else (`num_deferred`)."""
    kv_usage: float = 0.0
    """Fraction of the KV cache's blocks that running requests hold, 0 to 1."""
    num_restarts: int = 0
    """How often the rank was replaced since it was added to the engine."""
    num_deferred: int = 0
    """Requests among `num_waiting` that wait for their grammars or adapters, or for keys and values from elsewhere."""
    kv_fetches: dict[str, int] = field(default_factory=dict[str, int])
    """The requests among these that a KV connector brings keys and values for, by how far it is: the fields of
    `raycore.messages.KVFetches`."""
    sleep_level: int = 0
    """The level of the sleep if the rank is `asleep`, else 0."""
    running_adapters: tuple[str, ...] = ()
    """The names of the LoRA adapters of requests that have begun."""
    waiting_adapters: tuple[str, ...] = ()
    """The same for requests that haven't begun."""
    backends: tuple[str, ...] = ()
    """What computes the model in the rank's workers, without duplicates: `native`, with the instruction set, `triton`,
    or `torch`. Empty unless the rank's state is one of `UP_STATES`."""
    parts_by_torch: tuple[str, ...] = ()
    """The parts of the model that plain torch computes because these backends don't know them."""
    weights: tuple[str, ...] = ()
    """Which quantized weights of a GGUF file stay as they are, for each different answer of the workers."""
    decode_rate: float = 0.0
    """On CPUs: how many bytes of weights a second the rank has read lately, in steps that only decode. 0: it isn't
    known, or there were none."""
    memory_rate: float = 0.0
    """How many bytes a second the rank's threads could read when it had started, or `decode_rate` if that is more. 0:
    `decode_rate` is never known."""
    shortage: str = ""
    """What an `unplaced` rank needs, and a table of what each node has. Otherwise empty."""


@dataclass(frozen=True)
class EngineOwner:
    """What an engine belongs to and ends with: a program that is connected to Ray, an actor, a replica of Ray Serve, or
    a task."""

    kind: Literal["driver", "actor", "replica", "task"]
    name: str
    """An actor's own name, or its class and the beginning of its id. A replica's application, deployment and id,
    separated by `#`. Otherwise empty."""
    pid: int
    node_id: str
    node_ip: str
    job_id: str
    submission_id: str | None = None
    """The id of `ray job submit`; None if the job wasn't submitted."""


@dataclass(frozen=True)
class EngineStatus:
    """The status of an engine, as its driver sees it."""

    name: str
    model: str
    """The checkpoint's directory."""
    ranks: list[RankStatus]
    failure: str | None = None
    """Why the engine has failed; None if it hasn't."""
    weight_version: str = "default"
    """What the engine's weights are called."""
    owner: EngineOwner | None = None
    """What the engine belongs to. None: its ranks haven't been placed yet."""


@dataclass(frozen=True)
class FoundEngine:
    """An engine that runs in a cluster, and what was learnt of it."""

    address: str
    """That of its Ray cluster."""
    name: str
    status: EngineStatus | None = None
    """None: it wasn't asked, or gave no answer."""
    problem: str | None = None
    """A sentence that says why there is no status, or what is wrong with the engine. None: nothing."""


def describe_owner(owner: EngineOwner) -> str:
    """An engine's owner as text."""
    who, job = f"{owner.kind} {owner.name}".rstrip(), owner.submission_id or owner.job_id
    return f"{who} (pid {owner.pid}, node {owner.node_id[:_NODE_DIGITS]} at {owner.node_ip}, job {job})"


def describe_engine(status: EngineStatus) -> str:
    """An engine's status as text: a headline, a table of the ranks, and remarks on them."""
    headline = f"engine {status.name}: {num_serving(status)}, model {status.model}"
    if status.weight_version != "default":
        headline += f", weights of version {status.weight_version!r}"
    if status.owner is not None:
        headline += f", owner {describe_owner(status.owner)}"
    return "\n".join([headline, rank_table(status.ranks), *remarks(status.ranks)])


def remarks(ranks: Sequence[RankStatus]) -> list[str]:
    """What is told below the table: which ranks have no room, what plain torch computes, which weights of a GGUF file
    stay as they are, and how fast decodes read the weights."""
    reads = [f"dp{rank.dp_rank} {decode_speed(rank)}" for rank in ranks if rank.decode_rate]
    known = [*_shortages(ranks), *_parts_by_torch(ranks), *_stored_weights(ranks)]
    return [*known, *([f"weights that decodes read: {', '.join(reads)}"] if reads else [])]


def decode_speed(rank: RankStatus) -> str:
    """How fast decodes read the rank's weights, of what its memory gives, as text: for example `21.3 of 29.5 GB/s`."""
    return f"{rank.decode_rate / 1e9:.1f} of {rank.memory_rate / 1e9:.1f} GB/s"


def _shortages(ranks: Sequence[RankStatus]) -> list[str]:
    """For each set of ranks that lack the same, the lines that say what."""
    found = _ranks_by({rank.dp_rank: (rank.shortage,) if rank.shortage else () for rank in ranks})
    return [line for (missing,), names in found.items() for line in f"no room for {names}: {missing}".splitlines()]


def _parts_by_torch(ranks: Sequence[RankStatus]) -> list[str]:
    """For each set of parts that plain torch computes beside kernels, a sentence that names the ranks."""
    found = _ranks_by({rank.dp_rank: rank.parts_by_torch for rank in ranks})
    return [f"plain torch computes on {names}: {', '.join(parts)}" for parts, names in found.items()]


def _stored_weights(ranks: Sequence[RankStatus]) -> list[str]:
    """For each answer to which weights of a GGUF file stay as they are, a sentence that names the ranks."""
    found = _ranks_by({rank.dp_rank: rank.weights for rank in ranks})
    return [f"weights on {names}: {'; '.join(weights)}" for weights, names in found.items()]


def _ranks_by(values: Mapping[int, tuple[str, ...]]) -> dict[tuple[str, ...], str]:
    """Return the names of the ranks that have the same value, unless it is empty."""
    found: dict[tuple[str, ...], list[str]] = {}
    for dp_rank, value in values.items():
        if value:
            found.setdefault(value, []).append(f"dp{dp_rank}")
    return {value: ", ".join(names) for value, names in found.items()}


def num_serving(status: EngineStatus) -> str:
    """How many ranks serve, or are paused or asleep, as text: for example `2 of 3 ranks serving`."""
    states = Counter(rank.state for rank in status.ranks)
    state = next((state for state in ("asleep", "paused") if states[state]), "serving")
    return f"{states[state]} of {len(status.ranks)} ranks {state}"


def rank_table(ranks: Sequence[RankStatus]) -> str:
    """A table with one line per rank, below a line of headings."""
    return aligned([COLUMNS, *map(rank_cells, ranks)], LEFT_ALIGNED)


def engine_table(engines: Sequence[FoundEngine]) -> str:
    """A table with one line per engine, below a line of headings. If they are in several clusters, with the addresses
    of these. Problems are below the table."""
    columns = ("engine", "ranks", "model", "owner", "running", "waiting", "KV %")
    has_several = len({engine.address for engine in engines}) > 1
    rows = [("cluster", *columns), *((engine.address, *_engine_cells(engine)) for engine in engines)]
    table = aligned(rows if has_several else [row[1:] for row in rows], 5 if has_several else 4)
    return "\n".join([table, *(each.problem for each in engines if each.problem is not None)])


def _engine_cells(engine: FoundEngine) -> tuple[str, ...]:
    status = engine.status
    if status is None:
        return (engine.name, "no answer", *"-----")
    ranks = [rank for rank in status.ranks if rank.state in UP_STATES]
    return (
        engine.name,
        num_serving(status),
        status.model,
        "-" if status.owner is None else describe_owner(status.owner),
        str(sum(rank.num_running for rank in ranks)),
        str(sum(rank.num_waiting for rank in ranks)),
        f"{100 * max((rank.kv_usage for rank in ranks), default=0.0):.1f}",
    )


def rank_cells(rank: RankStatus) -> tuple[str, ...]:
    """A rank's row: one cell for each of the `COLUMNS`."""
    return (
        f"dp{rank.dp_rank}",
        rank.state,
        ",".join(node_id[:_NODE_DIGITS] for node_id in rank.node_ids) or "-",
        ",".join(rank.backends) or "-",
        "-" if rank.pid is None else str(rank.pid),
        ",".join(rank.gpu_ids) or "-",
        str(rank.num_running),
        str(rank.num_waiting),
        f"{100 * rank.kv_usage:.1f}",
        str(rank.num_restarts),
    )


def aligned(rows: Sequence[Sequence[str]], num_left: int = 0) -> str:
    """Rows as lines with aligned columns, of which the first `num_left` are left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < num_left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
