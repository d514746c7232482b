"""API servers: each that ends is replaced, and none ends by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from simulation.cluster.accounts.account import Account, ranks_of
from simulation.cluster.deployments.api_servers import SERVER

if TYPE_CHECKING:
    from raycore.llm import AsyncLLM


class APIServers(Account):
    """The API servers of an engine, if it has any."""

    def idle(self, llm: AsyncLLM) -> Iterator[str]:
        front, count = self.run.front, self.run.scenario.num_api_servers
        if front is not None and llm._client.failure is None and len(front.listening) != count:
            yield f"{len(front.listening)} API servers listen, not {count}"
        clients = {0, *(client.client_index for client in llm.clients._remote)}
        for connection, _, rank in ranks_of(llm) if front is not None else ():
            if gone := set(rank._mailbox._outboxes) - clients:
                yield f"dp_rank {connection.dp_rank} has outputs for clients that have ended: {sorted(gone)}"

    def over(self) -> Iterator[str]:
        if self.run.scenario.faults:
            return
        started = [each for each in self.run.cluster.gcs.actors.values() if each.class_name == SERVER]
        if len(started) > self.run.scenario.num_api_servers:
            yield f"{len(started)} API servers were started, though nothing has broken"
