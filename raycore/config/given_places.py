"""Where the caller wants workers: the forms of the options for bundles and devices, and vLLM's variables for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raycore.errors import InvalidConfig

if TYPE_CHECKING:
    from raycore.config.parallel import ParallelConfig

BUNDLES_VARIABLE = "VLLM_RAY_BUNDLE_INDICES"
GPUS_VARIABLE = "VLLM_RAY_PER_WORKER_GPUS"


def bundles_as_text(placement_bundle_indices: str | list[int] | list[list[int]]) -> str | None:
    """Convert the bundles of each rank's workers, or of the only rank's, to the form that they have as a flag."""
    if isinstance(placement_bundle_indices, str):
        return placement_bundle_indices.replace(" ", "")
    of_ranks = [_as_text([rank] if isinstance(rank, int) else rank) for rank in placement_bundle_indices]
    is_one_rank = all(isinstance(rank, int) for rank in placement_bundle_indices)
    return ("," if is_one_rank else ";").join(of_ranks) or None


def devices_as_text(device_ids: str | list[int | str]) -> str | None:
    """Convert a list of devices to the form that it has as a flag."""
    return (device_ids.replace(" ", "") if isinstance(device_ids, str) else _as_text(device_ids)) or None


def _as_text(values: Sequence[int | str]) -> str:
    return ",".join(map(str, values))


def take_variables(chosen: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Let vLLM's variables be the defaults of the options that say the same.

    Raises:
        InvalidConfig: the value of a variable isn't valid.
    """
    bundles, gpus = environ.get(BUNDLES_VARIABLE, ""), environ.get(GPUS_VARIABLE, "")
    if bundles and chosen.get("placement_bundle_indices") is None:
        if not all(part.strip().isdecimal() for part in bundles.split(",")):
            raise InvalidConfig(f"{BUNDLES_VARIABLE}={bundles!r} isn't numbers of bundles, separated by commas")
        chosen["placement_bundle_indices"] = bundles.replace(" ", "")
    if gpus and chosen.get("gpus_per_worker", 1.0) == 1.0:
        try:
            fraction = float(gpus)
        except ValueError:
            fraction = 0.0
        if not 0.0 < fraction <= 1.0:
            raise InvalidConfig(f"{GPUS_VARIABLE}={gpus!r} isn't a number above 0, at most 1")
        chosen["gpus_per_worker"] = fraction


def bundle_indices(parallel: ParallelConfig) -> list[list[int]] | None:
    """Return the bundles of each rank's workers. None: they aren't given.

    Raises:
        InvalidConfig: their number isn't that of the ranks and workers, or a rank has a bundle twice.
    """
    text, num_ranks, size = parallel.placement_bundle_indices, parallel.data_parallel_size, parallel.world_size
    if text is None:
        return None
    ranks = [[int(index) for index in rank.split(",")] for rank in text.split(";")]
    if len(ranks) == 1 and len(ranks[0]) == num_ranks * size:  # as vLLM's variable, which knows no ranks
        ranks = [ranks[0][start : start + size] for start in range(0, num_ranks * size, size)]
    if len(ranks) != num_ranks or any(len(rank) != size for rank in ranks):
        raise InvalidConfig(
            f"{_named(text)} doesn't fit data_parallel_size={num_ranks} with {size} worker{'s' * (size > 1)} in each "
            "rank: give one bundle for each worker of each rank, such as "
            f"{';'.join(_as_text(range(rank * size, (rank + 1) * size)) for rank in range(num_ranks))!r}"
        )
    twice = [index for rank in ranks for index in rank if rank.count(index) > 1]
    if twice:
        raise InvalidConfig(f"{_named(text)} has bundle {twice[0]} twice in one rank: each worker needs its own")
    return ranks


def _named(text: str) -> str:
    return f"placement_bundle_indices={text!r} (or {BUNDLES_VARIABLE})"


def device_ids(parallel: ParallelConfig, visible: str | None) -> list[list[str]] | None:
    """Return the devices of each rank's workers. None: they aren't given.

    Args:
        visible: CUDA_VISIBLE_DEVICES of the process that starts the engine. Numbers are places in it, if it has any.

    Raises:
        InvalidConfig: there are fewer or more devices than workers, one of them twice, or one that isn't visible.
    """
    text, size = parallel.device_ids, parallel.world_size
    if text is None:
        return None
    given, num_workers = text.split(","), parallel.data_parallel_size * size
    if len(given) != num_workers or len(set(given)) != len(given):
        raise InvalidConfig(
            f"device_ids={text!r} has {len(set(given))} different devices, but there are {num_workers} workers: give "
            "each worker one of its own"
        )
    if visible:
        known = visible.split(",")
        for device in given:
            if device.isdecimal() and int(device) >= len(known):
                raise InvalidConfig(
                    f"device_ids={text!r}: there is no device {device}, because CUDA_VISIBLE_DEVICES={visible!r} has "
                    f"{len(known)}, and numbers count from 0 in it"
                )
        given = [known[int(device)] if device.isdecimal() else device for device in given]
    return [given[start : start + size] for start in range(0, num_workers, size)]
