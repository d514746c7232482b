"""What the configurations of Ray's libraries for language models say of an engine's workers. Pure."""

from __future__ import annotations

from typing import Any, cast

from raycore.errors import InvalidConfig
from raycore.json_fields import shortened

_STRATEGIES = {"PACK": "span", "STRICT_PACK": "fill"}
"""raycore's placement strategies, by Ray's for the workers of a rank."""


def take(options: dict[str, Any], name: str, value: object, field: str) -> None:
    """Take out an option that the configuration has itself, as its `field`.

    Raises:
        InvalidConfig: the option has another value than the field.
    """
    given = options.pop(name, None)
    if given not in (None, value):
        raise InvalidConfig(f"engine_kwargs has {name}={shortened(given)}, but {field}={value!r}: omit it")


def num_workers(options: dict[str, Any]) -> int:
    """Number of workers of a rank."""
    return int(options.get("tensor_parallel_size") or 1) * int(options.get("pipeline_parallel_size") or 1)


def with_resources(
    options: dict[str, Any], placement_group_config: dict[str, Any] | None, accelerator_type: str | None
) -> dict[str, Any]:
    """An engine's options, and those that its workers' resources become.

    Raises:
        InvalidConfig: the placement group is one that the workers of a rank can't have.
    """
    if placement_group_config is not None:
        options = options | _placement(placement_group_config, num_workers(options))
    if accelerator_type is not None:
        kind = {f"accelerator_type:{accelerator_type}": 0.001}
        options = options | {"resources_per_worker": (options.get("resources_per_worker") or {}) | kind}
    return options


def _placement(given: dict[str, Any], workers: int) -> dict[str, Any]:
    unknown = sorted(given.keys() - {"bundle_per_worker", "bundles", "strategy"})
    bundle: Any = given.get("bundle_per_worker")
    bundles: Any = given.get("bundles")
    if unknown or (bundle is None) == (bundles is None):
        raise InvalidConfig(
            f"placement_group_config={shortened(given)}: give 'bundle_per_worker' or 'bundles', and 'strategy' at most"
        )
    if bundles is not None:
        if len(bundles) != workers or any(each != bundles[0] for each in bundles):
            raise InvalidConfig(
                f"placement_group_config: bundles={shortened(bundles)} aren't {workers} equal ones, one for each "
                "worker of a rank"
            )
        bundle = bundles[0]
    strategy = given.get("strategy") or "PACK"
    if strategy not in _STRATEGIES:
        raise InvalidConfig(
            f"placement_group_config: strategy={strategy!r} is not supported: use {' or '.join(_STRATEGIES)}"
        )
    amounts = {name: amount for name, amount in cast("dict[str, float]", bundle).items() if amount != 0}
    return {"resources_per_worker": amounts, "placement_strategy": _STRATEGIES[strategy]}
