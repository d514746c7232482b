"""One data-parallel rank as the driver holds it: its placement group, its actor, and the refs by which it is known."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ray.util.placement_group import PlacementGroup

from raycore.messages import EngineInfo
from raycore.node.processes import send_signal
from raycore.ray_api import kill

if TYPE_CHECKING:
    from ray import ObjectRef

    from raycore.engine.engine_actor import DPEngineCoreActor


@dataclass(eq=False)
class Rank:
    """A rank from its creation to its end. One that takes its place is another `Rank` with the same `dp_rank`."""

    dp_rank: int
    group: PlacementGroup | None
    """None once it was given back."""
    nodes: list[str]
    """The node id of each of the group's bundles."""
    actor: DPEngineCoreActor
    init_ref: ObjectRef[bytes]
    """Completes when the rank is up, or can't be."""
    info: EngineInfo | None = None
    """What it said of itself; None until it is up."""
    run_ref: ObjectRef[None] | None = None
    """Completes when the rank ends, however it does."""

    @property
    def is_on_one_node(self) -> bool:
        """Whether its engine and all its workers are."""
        return len(set(self.nodes)) == 1

    def pids_on(self, node_id: str) -> list[int]:
        """Its processes, as far as they are known to be on this node."""
        if self.info is None or set(self.nodes) != {node_id}:
            return []
        return sorted({self.info.pid, *self.info.worker_pids})

    def end(self) -> None:
        """Have Ray end the rank's processes, which takes a moment."""
        kill(self.actor)

    def kill(self, node_id: str) -> None:
        """End the rank's processes: those on `node_id`, which is the caller's, at once, the others through Ray.

        Ray asks a process to end before it makes it end. One that is stopped hears nothing, and a failed engine's
        workers hear late, while the rank that takes this one's place waits for what they hold.
        """
        self.end()
        send_signal(self.pids_on(node_id), signal.SIGKILL)
