"""What is said of ranks that are lost: who has ended where, why, as Ray says it, and what that process has logged last.

The cause comes first, and without what Ray says besides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ray.exceptions import RayError

from raycore.client.group import ClientGroup
from raycore.engine.rank_events import LossExplained
from raycore.errors import EngineDeadError
from simulation.cluster.accounts.account import Account, Run
from simulation.ray.cluster import Cluster
from simulation.ray.logs import was_reachable, words_of
from simulation.world import kernel

_OWN_WORDS = re.compile(r"its process \d+ ended|was killed: |can no longer be monitored")
"""Of the product itself, when Ray has said nothing yet."""
_RAYS_LINES = re.compile(r"^\s*(class_name|actor_id|namespace): ", re.MULTILINE)
_PLACE = re.compile(r"dp_rank \d+ \(pid (\d+), node (\w+)\)")


def problems(error: EngineDeadError, cluster: Cluster) -> Iterator[str]:
    """What is wrong with an explanation that has just been given to the process that runs."""
    said = str(error)
    if (lines := _RAYS_LINES.search(said.partition("\nray::")[0])) is not None:  # a traceback may have them
        yield f"an explanation has {lines[0].strip()!r} of Ray's: {said}"
    for pid, node in _PLACE.findall(said):
        found = [each for each in cluster.actor_processes if each.pid == int(pid)]
        if not any(getattr(each.machine, "id", "").startswith(node) for each in found):
            yield f"no process {pid} has run on the node {node}: {said}"
    if not _OWN_WORDS.search(said) and not isinstance(error.__cause__, RayError):
        yield f"Ray has said why, and the explanation has no cause: {said}"
    node = next((each for each in cluster.nodes if each.id == error.node), None)
    thread = cluster.world.current
    assert thread is not None
    if error.pid is None or node is None or not (node is thread.process.machine or was_reachable(cluster, node)):
        return
    for each in cluster.actor_processes:
        if each.pid == error.pid and each.machine is node and words_of(each) not in said:
            yield f"an explanation hasn't {words_of(each)!r}: {said}"


class Losses(Account):
    """What the driver hears of ranks that are lost."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        global _account
        _account = self

    def note(self, event: LossExplained) -> None:
        current = self.run.cluster.world.current
        if current is not None and current.process is self.run.faults.driver:
            self.problems += problems(event.error, self.run.cluster)


_account: Losses | None = None
"""That of the present run."""
_original = ClientGroup.on_rank_event


def _on_rank_event(self: ClientGroup, event: Any) -> None:
    if _account is not None and kernel.the_world is not None and isinstance(event, LossExplained):
        _account.note(event)
    _original(self, event)


ClientGroup.on_rank_event = _on_rank_event
