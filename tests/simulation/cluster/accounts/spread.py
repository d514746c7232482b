"""The strategy `strict`: ranks that are placed make their numbers on the nodes equal, or as even as possible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from simulation.cluster.accounts.account import Account, amounts_of_rank
from simulation.ray.nodes import Node

if TYPE_CHECKING:
    from raycore.llm import AsyncLLM

_STEADY_S = 15.0
"""Virtual seconds before the last rank was placed in which no other one was, and no node changed: Ray shows after up to
a second what is free again, and an attempt to place a rank takes 5 s."""
_OF_NODES = ("crash node", "lose node", "drain node", "node stands still", "stall gcs", "restart gcs")
_UP = ("serving", "paused", "asleep")


class Spread(Account):
    """Where ranks are, once all of them serve."""

    settles_s = 0.0

    def idle(self, llm: AsyncLLM) -> Iterator[str]:
        ranks = list(llm._manager.ranks.values())
        if llm.config.parallel.placement_strategy != "strict" or any(each.state not in _UP for each in llm.ranks):
            return
        actors: dict[int, Any] = {rank.dp_rank: rank.actor for rank in ranks}
        asked_s = {dp_rank: handle._actor.asked_s for dp_rank, handle in actors.items()}
        last = max(ranks, key=lambda rank: asked_s[rank.dp_rank])
        if self._was_unsteady(last.dp_rank, asked_s):
            return
        counts = Counter(rank.nodes[0] for rank in ranks)
        if len(counts) > 1 and len(set(counts.values())) == 1:
            return  # as even, on fewer nodes
        needed, own = amounts_of_rank(llm), counts[last.nodes[0]]
        for node in self.run.cluster.nodes:
            if counts[node.id] <= own - 2 and self._has_room(node, needed):
                yield (
                    f"dp_rank {last.dp_rank} was placed last, on a node of {own} ranks, and {node} has room and "
                    f"{counts[node.id]}"
                )

    def _was_unsteady(self, last: int, asked_s: dict[int, float]) -> bool:
        """Whether something else may explain where the last rank is."""
        since_s = asked_s[last] - _STEADY_S
        ends_s = [at_s + fault.for_s for at_s, fault in self.run.faults.struck if fault.kind in _OF_NODES]
        others_s = [at_s for dp_rank, at_s in asked_s.items() if dp_rank != last]
        return any(at_s > since_s for at_s in (*ends_s, *others_s))

    @staticmethod
    def _has_room(node: Node, needed: dict[str, float]) -> bool:
        return node.takes_actors and node.answers and not node.raylet.has_ended and node.fits(needed)
