"""What the engine may be in the middle of, as far as operators know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from raycore.activity import TAGS
from simulation.cluster.operations.contract import NEVER_S, Condition, History, is_done, is_refused
from simulation.cluster.records import Deed


def can_change_weights(history: History) -> bool:
    """Whether the weights of the model can be replaced. Those of a model that pools can't."""
    return history.options.get("runner") != "pooling"


def can_read_weights(options: Mapping[str, Any]) -> bool:
    """Whether the demo model's files have the weights of the model. There are none of other models."""
    return options.get("load_format") != "dummy"


def _asleep(tag: str) -> Condition:
    def sleeps(deed: Deed) -> bool:
        return deed.operation.kind == "sleep" and deed.operation.arguments.get("level", 1) > 0 and not is_refused(deed)

    def wakes(deed: Deed) -> bool:
        tags = deed.operation.arguments.get("tags")
        return deed.operation.kind == "wake_up" and (tags is None or tag in tags)

    return Condition(sleeps, is_done, wakes, lambda deed: wakes(deed) and is_done(deed))


ASLEEP = {tag: _asleep(tag) for tag in TAGS}
"""Whether this memory is asleep."""


def _updates(*kinds: str) -> Callable[[Deed], bool]:
    return lambda deed: deed.operation.kind in kinds


def _ends_update(deed: Deed) -> bool:
    kind = deed.operation.kind
    if deed.ended_s is None:
        return False
    if kind in ("update_weights", "finish_weight_update") and deed.error is not None:
        return not is_refused(deed)
    return kind in ("finish_weight_update", "cancel_weight_update") and deed.error is None


def updating(history: History) -> Condition:
    """Whether a trainer's update is under way."""
    return Condition(
        lambda deed: deed.operation.kind == "start_weight_update" and (is_done(deed) or deed.ended_s is None),
        is_done,
        lambda deed: _updates("finish_weight_update", "cancel_weight_update")(deed) or _ends_update(deed),
        _ends_update,
        for_s=history.options.get("weight_update_timeout_s", NEVER_S),
    )


RELOADING = Condition(_updates("reload_weights"), lambda deed: False, lambda deed: False, _updates("reload_weights"))
"""Whether a checkpoint is being read."""

PAUSED = Condition(
    lambda deed: deed.operation.kind in ("pause_generation", "sleep") and not is_refused(deed),
    is_done,
    # a pause that waits for requests lets them go on first
    lambda deed: (
        deed.operation.kind in ("resume_generation", "wake_up")
        or (deed.operation.kind in ("pause_generation", "sleep") and deed.operation.arguments.get("mode") == "wait")
    ),
    lambda deed: deed.operation.kind == "resume_generation" and is_done(deed),
)
"""Whether an operator has paused the engine."""
