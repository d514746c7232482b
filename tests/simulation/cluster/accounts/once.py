"""Each output is delivered once and in order, over losses of ranks and new connections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from simulation.cluster.accounts.account import Account, Run, ranks_of
from simulation.cluster.records import Record

if TYPE_CHECKING:
    from raycore.llm import AsyncLLM


class Once(Account):
    """What callers get, and how many batches have come from each rank."""

    is_of_clients = True

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._seen: dict[int, tuple[Any, ...]] = {}
        """By the number of the request: what its last output was."""

    def output(self, record: Record, output: Any) -> None:
        parts = tuple(
            (len(part.token_ids), part.finish_reason) for part in getattr(output, "outputs", ()) if _has_tokens(part)
        )
        if not parts:
            return
        before = self._seen.get(record.number)
        self._seen[record.number] = parts
        if before is None:
            return
        if parts == before:
            self.problems.append(f"{record.name} got the same output twice: {parts}")
        elif any(now < earlier for (now, _), (earlier, _) in zip(parts, before, strict=True)):
            self.problems.append(f"{record.name} got an older output after a newer one: {parts} after {before}")

    def idle(self, llm: AsyncLLM) -> Iterator[str]:
        client = llm._client._connections._client_index
        for connection, _, rank in ranks_of(llm):
            outbox = rank._mailbox._outboxes.get(client)
            if outbox is None:
                continue
            # those of aborted requests that aren't due wait for the next ones
            if outbox._is_due and outbox._steps:
                yield f"dp_rank {connection.dp_rank} has {len(outbox._steps)} outputs that nobody takes"
            if outbox._connection == connection.number and outbox._num_taken != connection.num_batches:
                number, sent = connection.num_batches, outbox._num_taken
                yield f"dp_rank {connection.dp_rank} has sent {sent} batches, and {number} were delivered"


def _has_tokens(part: Any) -> bool:
    return getattr(part, "token_ids", None) is not None
