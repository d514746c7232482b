"""The driver's view of one data-parallel rank: its placement group, its actor, and the refs of its calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from placement.reserve import RankBundles
from raycore.messages import EngineInfo

if TYPE_CHECKING:
    from ray import ObjectRef

    from raycore.cluster.desired import Desired
    from raycore.cluster.given import GivenDevices
    from raycore.engine.engine_actor import DPEngineCoreActor


@dataclass
class HeldWeights:
    """What is known of the weights that a rank has. Anyone may read it; `EngineWeights` writes it."""

    config_path: str | None = None
    """The checkpoint of the rank's configuration, which its workers read at their start and after a deep sleep."""
    loaded_path: str | None = None
    """The checkpoint whose weights the rank has, as it was loaded with them. None: they came from elsewhere."""
    number: int | None = None
    """Their number: see `WeightVersion`. None: that isn't known."""
    is_stale: bool = False
    """Whether the rank has none that it may serve with."""


@dataclass(eq=False)
class Rank:
    """A rank from its creation to its end. The rank that replaces it is another `Rank` with the same `dp_rank`."""

    dp_rank: int
    bundles: RankBundles | GivenDevices | None
    """The rank's bundles or devices; None after the removal of their placement group."""
    nodes: list[str]
    """The node id of each of the rank's bundles, or of each device."""
    actor: DPEngineCoreActor
    init_ref: ObjectRef[bytes]
    """The ref of the rank's `wait_for_init()`. It completes when the rank is up, or has failed to start."""
    info: EngineInfo | None = None
    """The result of `init_ref`; None until the rank is up."""
    run_ref: ObjectRef[None] | None = None
    """The ref of the rank's `run()`. It completes when the rank ends, for any reason. None before `run()` is called."""
    engine_node: str = ""
    """The id of the node on which the rank's engine runs."""
    weights: HeldWeights = field(default_factory=HeldWeights)
    followed: Desired | None = None
    """What the rank was brought to last, before it joined. None: nothing yet."""
    awaits_group: bool = False
    """Whether the ranks that it will share experts with have yet to give it its weights. It hasn't joined then."""
    has_joined: bool = False
    """Whether the rank takes part in updates of weights."""
    is_announced: bool = False
    """Whether clients know that the rank is up."""

    @property
    def is_on_one_node(self) -> bool:
        """Whether the rank's engine and all its workers are on the same node."""
        return len(set(self.nodes)) == 1

    def pids_on(self, node_id: str) -> list[int]:
        """The ids of the rank's processes, if the rank is up and all of it is on this node; otherwise empty."""
        if self.info is None or set(self.nodes) != {node_id}:
            return []
        return sorted({self.info.pid, *self.info.worker_pids})


def workers_by_node(nodes_of_ranks: Iterable[Sequence[str]], world_size: int) -> Counter[str]:
    """The number of workers of all ranks on each node, whose cores they share.

    Args:
        nodes_of_ranks: the node of each of a rank's bundles, the workers' first.
        world_size: workers of a rank.
    """
    return Counter(node for nodes in nodes_of_ranks for node in nodes[:world_size])
