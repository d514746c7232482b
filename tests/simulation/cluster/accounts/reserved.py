"""What an engine has in the cluster while it goes on: a group for each rank, and the processes of ranks and standbys.

What ranks had that were lost or have left is gone before the engine's end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from simulation.cluster.accounts.account import Account
from simulation.cluster.faults import ENGINE, WORKER

if TYPE_CHECKING:
    from raycore.llm import AsyncLLM


class Reserved(Account):
    """Groups and actors of an idle engine."""

    def idle(self, llm: AsyncLLM) -> Iterator[str]:
        gcs, parallel = self.run.cluster.gcs, llm.config.parallel
        groups = [each for each in gcs.groups.values() if each.state != "REMOVED"]
        # a standby on each node
        num_standbys = 0 if llm.config.recovery.standby_delay_s is None else len(self.run.cluster.nodes)
        num_engines = len(llm.ranks) + num_standbys
        actors = Counter(each.class_name for each in gcs.actors.values() if not each.is_dead)
        for what, number, most in (
            ("groups", len(groups), len(llm.ranks)),
            ("processes of engines", actors[ENGINE], num_engines),
            ("workers", actors[WORKER], num_engines * parallel.world_size),
        ):
            if number > most:
                yield f"the engine has {number} {what} for {len(llm.ranks)} ranks, not {most}: {groups}"
