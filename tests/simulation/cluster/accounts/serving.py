"""Ranks: all serve again for which the cluster has room, once everything is over that breaks.

Only scenarios with `awaits_ranks` wait for that. Others shut the engine down as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from simulation.cluster.accounts.account import Account, Run, amounts_of_rank
from simulation.cluster.circumstances import raising
from simulation.ray.nodes import Node

if TYPE_CHECKING:
    from raycore.llm import AsyncLLM
    from raycore.status import RankStatus

_LOOK_S = 0.4
"""How often this looks whether any rank serves. A rank that is replaced is out of service for longer."""
_UP = ("serving", "paused", "asleep")


class Serving(Account):
    """How many ranks serve, and why the others don't."""

    settles_s = 300.0
    """Virtual seconds within which ranks serve once there is room. A silent node is dead after 16 s, another attempt
    may come after 30 s, and one takes up to 30 s: each may happen several times."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._llm: AsyncLLM | None = None
        self._had_none = False
        """Whether no rank has served for a while. Only then an attempt counts that finds no room."""

    def begin(self, llm: AsyncLLM) -> None:
        if self.run.scenario.awaits_ranks:
            self._llm = llm
            self._watch()

    def _watch(self) -> None:
        if self._llm is not None:
            self._had_none |= not self._llm._supervisor._serving()
            self.run.cluster.world.call_later(_LOOK_S, self._watch)

    def idle(self, llm: AsyncLLM) -> Iterator[str]:
        if self._llm is None or llm._client.failure is not None:
            return
        if self.run.cluster.world.now_s < self.run.faults.over_s:
            yield "what has broken isn't over"
            return
        ranks = llm.ranks
        up = [each for each in ranks if each.state in _UP]
        out = [each for each in ranks if each.state not in _UP]
        given_up = [each for each in out if each.state == "gone"]
        # a rank is given up, too, when the thread that monitors it can't go on
        is_unexpected = all(each.kind != raising.KIND for each in self.run.scenario.faults)
        for each in given_up if is_unexpected else ():
            num_starts = self._num_starts(each.dp_rank)
            if not self._had_none and num_starts < llm.config.recovery.max_rank_restarts:
                yield f"dp_rank {each.dp_rank} was given up after {num_starts} starts"
        for each in out:
            if each.state == "stale" and up and not self._may_be_stale(llm):
                yield f"dp_rank {each.dp_rank} is stale, and dp_rank {up[0].dp_rank} has the weights"
        waiting = [each for each in out if each.state not in ("gone", "stale")]
        room = self._room(llm) - (len(ranks) - len(waiting) - len(given_up))
        if waiting and room > 0:
            yield f"there is room for {room} more ranks, and there are: {_described(ranks)}"

    def stopped(self, llm: AsyncLLM) -> Iterator[str]:
        self._llm = None
        return iter(())

    def _may_be_stale(self, llm: AsyncLLM) -> bool:
        """Whether a rank can't get the weights from another one: they are asleep, each has others, or it can't read."""
        is_broken = any(each.kind == "break_worker" for each in self.run.scenario.operations)
        return is_broken or llm._manager.shares_experts or llm._manager.weights.latest.is_missing

    def _num_starts(self, dp_rank: int) -> int:
        """How often processes were started to replace this rank, and perhaps another one."""
        ends = f"_dp{dp_rank}"
        names = [actor.name for actor in self.run.cluster.gcs.actors.values()]
        first = sum(name.endswith(ends) for name in names)
        return sum(f"{ends}_" in name or name.endswith(ends) or "_standby" in name for name in names) - first

    def _room(self, llm: AsyncLLM) -> int:
        """How many ranks fit into the nodes, each on one, if nothing else is there but what Ray has lost."""
        needed = amounts_of_rank(llm)
        return sum(
            int(min(self._usable(node, name) // amount for name, amount in needed.items() if amount > 0))
            for node in self.run.cluster.nodes
            if node.takes_actors and not node.is_lost and not node.raylet.has_ended
        )

    def _usable(self, node: Node, name: str) -> float:
        leaked = [
            pool.total.get(name, 0.0)
            for group in self.run.cluster.gcs.groups.values()
            for pool, where in zip(group.pools, group.nodes, strict=True)
            if group.state == "REMOVED" and where is node
        ]
        return node.total.get(name, 0.0) - sum(leaked)


def _described(ranks: list[RankStatus]) -> str:
    return ", ".join(f"dp_rank {each.dp_rank} {each.state}" for each in ranks)
