"""Where the caller wants an engine's ranks: in bundles of its placement groups, or on GPUs that it has already.

`find_given` decides it, from what the caller says and where the caller itself runs, as vLLM's Ray executor does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from placement.reserve import bundles_with, label_of
from raycore.config import EngineConfig
from raycore.config.given_places import BUNDLES_VARIABLE, device_ids
from raycore.errors import InvalidConfig
from raycore.json_fields import shortened
from raycore.system import os

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from raycore.cluster.runtime import Runtime


@dataclass(frozen=True)
class GivenDevices:
    """The GPUs of a rank whose workers reserve nothing: the caller has them already, or has named them."""

    node_id: str
    """The caller's node, on which the rank runs."""
    ids: list[str]
    """Each worker's, as in CUDA_VISIBLE_DEVICES."""

    def nodes(self) -> list[str]:
        """The node id of each worker."""
        return [self.node_id] * len(self.ids)


@dataclass(frozen=True)
class GivenPlaces:
    """What the caller gives an engine. Without groups and devices, raycore makes placement groups of its own."""

    groups: Sequence[PlacementGroup] | None = None
    """One for each rank. Several ranks may have the same group. raycore never removes them. None: there are none."""
    indices: Sequence[Sequence[int]] | None = None
    """The bundles of each rank's workers in its group. None: those after the bundles of the ranks before, and one for
    the engine's process, too."""
    devices: Sequence[GivenDevices] = ()
    """Each rank's."""

    @property
    def has_only_places_of_workers(self) -> bool:
        """Whether the engine's processes have no place of their own. They and the workers then reserve no CPUs, except
        that a worker which computes on CPUs reserves one."""
        return self.indices is not None or bool(self.devices)


def find_given(
    config: EngineConfig, placement_groups: Sequence[PlacementGroup] | None, node_id: str, runtime: Runtime
) -> GivenPlaces:
    """Return where the caller, which runs on node `node_id`, wants the ranks. `config.device` must be resolved.

    Raises:
        InvalidConfig: what the caller says can't be.
    """
    parallel = config.parallel
    indices, num_ranks, size = parallel.bundle_indices, parallel.data_parallel_size, parallel.world_size
    if parallel.device_ids is not None:
        _check_devices(config, placement_groups)
        ids = device_ids(parallel, os.environ.get("CUDA_VISIBLE_DEVICES")) or []
        return GivenPlaces(devices=[GivenDevices(node_id, each) for each in ids])
    if placement_groups is not None:
        for number, group in enumerate(placement_groups):
            given: Any = group  # users may pass anything
            if not hasattr(given, "id"):
                raise InvalidConfig(
                    f"placement_groups[{number}]={shortened(given)} isn't a placement group: give what "
                    "ray.util.placement_group() returned"
                )
        return GivenPlaces(list(placement_groups), indices)
    if indices is not None:
        group = runtime.own_group(captures=False)
        if group is None:
            raise InvalidConfig(
                f"placement_bundle_indices={parallel.placement_bundle_indices!r} (or {BUNDLES_VARIABLE}) has no "
                "placement group: pass placement_groups, or start the engine in an actor that runs in one"
            )
        return GivenPlaces([group] * num_ranks, indices)
    if config.device != "cuda":
        return GivenPlaces()
    gpus = runtime.own_gpus()
    if len(gpus) >= num_ranks * size:
        return GivenPlaces(
            devices=[GivenDevices(node_id, gpus[rank * size : (rank + 1) * size]) for rank in range(num_ranks)]
        )
    group = runtime.own_group(captures=True)
    return GivenPlaces() if group is None else GivenPlaces([group] * num_ranks, _with_gpus(group, num_ranks, size))


def _check_devices(config: EngineConfig, placement_groups: object) -> None:
    asked = f"device_ids={config.parallel.device_ids!r}"
    if placement_groups is not None:
        raise InvalidConfig(f"{asked} reserves nothing, and placement_groups say where to reserve: omit one of them")
    if config.device != "cuda":
        raise InvalidConfig(f"{asked} needs GPUs, but device={config.device!r} was chosen here: omit it")


def _with_gpus(group: PlacementGroup, num_ranks: int, size: int) -> list[list[int]]:
    """The first bundles with GPUs, for all ranks in turn."""
    found = bundles_with(group, "GPU")
    if len(found) < num_ranks * size:
        raise InvalidConfig(
            f"{label_of(group)}, in which the actor that starts this engine runs, has GPUs in "
            f"{len(found)} of its bundles, but there are {num_ranks * size} workers: give it more bundles with GPUs, "
            "pass placement_groups, or start the actor without placement_group_capture_child_tasks"
        )
    return [found[rank * size : (rank + 1) * size] for rank in range(num_ranks)]
