"""What the client keeps of requests and streams, and what is left on callers' event loops when these end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from simulation.cluster.accounts.account import Account, Run, ranks_of
from simulation.engine.leftovers import leftovers
from simulation.world import loops

if TYPE_CHECKING:
    from raycore.llm import AsyncLLM
    from raycore.running_engine import RunningEngine


class Callers(Account):
    """The client's books, and the loops of callers and operators."""

    is_of_clients = True

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        loops.on_end = self._look_at_loop

    def idle(self, llm: AsyncLLM) -> Iterator[str]:
        for what, value in kept(llm):
            if value:
                yield f"no caller waits, and the client keeps {what}: {value}"

    stopped = idle

    def _look_at_loop(self, loop: loops.Loop) -> None:
        """At the end of `asyncio.run`. What asyncio itself would cancel and drop in silence is a problem."""
        timers = [handle for _, _, handle in loop._timers if not handle.cancelled()]
        for what, left in (("tasks", list(loop._tasks)), ("timers", timers)):
            if left:
                self.problems.append(f"an event loop ends with {what}: {left}")


def kept(llm: RunningEngine) -> Iterator[tuple[str, Any]]:
    """What a client keeps, each with its name: empty, or 0, if no caller waits for anything."""
    client = llm._client
    table, outputs = client._requests, client._requests._outputs
    yield "unfinished requests", table._underway
    yield "requests that a rank computes for another", table._computing
    yield "requests that are to go on elsewhere", table._computed
    yield "requests without a rank", table._parked
    yield "paused requests", table._paused
    yield "requests older than a pause", table._older
    yield "requests to be sent again", table._asked_again
    if client.failure is None:
        yield "losses without explanation", table._unexplained
        router = table.router
        yield "requests of ranks", table.by_rank._ids
        yield "requests on ranks", {rank: each.own for rank, each in router._counts.items() if each.own}
    yield "requests with outputs", outputs._requests
    yield "sequences", outputs._sequences
    yield "tokens of sequences", outputs._token_ids
    yield "sequences to be looked at", outputs._watched
    yield "sequences without tokens", outputs._tokenless
    yield "sequences whose weights may change", outputs._unversioned
    yield "traced sequences", outputs._traced
    yield "times of tokens", len(table._recorder._gaps)
    yield "reserved ids", client.reserved._on_end
    yield "open streams", [name for each in llm._streams._loops.values() for name in each._streams]


def left_by_requests(llm: RunningEngine) -> Iterator[str]:
    """What the client and the ranks keep of requests, though there are none."""
    for what, value in kept(llm):
        if value:
            yield f"the client keeps {what}: {value}"
    for connection, _, rank in ranks_of(llm):
        assert rank._core is not None
        for each in leftovers(rank._core, rank._mailbox):
            yield f"dp_rank {connection.dp_rank} has {each}"
