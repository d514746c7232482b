"""How a model's layers are divided over the stages of a pipeline.

Stages compute at the same time, each another step, so the slowest one determines the throughput. The first stage has
the embedding, too, which takes next to no time, and the last one the head.
"""

from __future__ import annotations

__all__ = ["Stage", "layer_costs", "split_layers"]

import math
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

from raycore.errors import InvalidConfig
from raycore.models.spec import ModelSpec


class Stage(NamedTuple):
    """A stage's part of the model."""

    layers: range
    is_first: bool = True
    """Whether the stage has the embedding."""
    is_last: bool = True
    """Whether the stage has the final norm and the head, and samples."""

    @staticmethod
    def whole(spec: ModelSpec) -> Stage:
        """Return the only stage of a model that isn't divided."""
        return Stage(range(spec.num_layers))


def split_layers(spec: ModelSpec, num_stages: int, layer_counts: list[int] | None = None) -> list[Stage]:
    """Divide the layers over `num_stages` stages so that the largest stage is as small as possible.

    Args:
        layer_counts: the number of layers of each stage. None: chosen here.

    Raises:
        InvalidConfig: there are more stages than layers, or `layer_counts` doesn't fit.
    """
    if num_stages == 1 and layer_counts is None:
        return [Stage.whole(spec)]  # which may have no layers
    if num_stages > spec.num_layers:
        raise InvalidConfig(
            f"pipeline_parallel_size={num_stages} is more than the model's {spec.num_layers} layers "
            "(num_hidden_layers): use fewer stages"
        )
    later = frozenset(layer for layer, mixer in enumerate(spec.mixers) if mixer.needs_layer_before)
    if layer_counts is None and num_stages <= spec.num_layers - len(later):
        ends = _best_ends(layer_costs(spec), num_stages, later)
    elif layer_counts is None:
        raise InvalidConfig(
            f"pipeline_parallel_size={num_stages} is more than the {spec.num_layers - len(later)} layers of the model "
            "that select tokens, with one of which each stage begins: use fewer stages"
        )
    elif len(layer_counts) == num_stages and sum(layer_counts) == spec.num_layers and min(layer_counts) > 0:
        ends = list(accumulate(layer_counts))
    else:
        raise InvalidConfig(
            f"pipeline_layers={','.join(map(str, layer_counts))} doesn't divide the model's {spec.num_layers} layers "
            f"over pipeline_parallel_size={num_stages} stages: give the number of layers of each stage, at least 1"
        )
    starts = [0, *ends[:-1]]
    if wrong := later.intersection(starts):
        raise InvalidConfig(
            f"pipeline_layers={','.join(map(str, layer_counts or []))}: a stage can't begin with layer {min(wrong)}, "
            "which sees the tokens that the layer before it has selected: give other numbers, or omit pipeline_layers"
        )
    last = num_stages - 1
    return [
        Stage(range(start, end), stage == 0, stage == last)
        for stage, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]


def layer_costs(spec: ModelSpec) -> list[int]:
    """Return the number of multiplications for one token in each layer. The last layer's includes the head's.

    Those of attention itself are not counted, because they depend on the length of the sequence.
    """
    layers = zip(spec.mixers, spec.feed_forwards, strict=True)
    costs = [mixer.num_weights(spec) + feed_forward.num_weights(spec) for mixer, feed_forward in layers]
    costs[-1] += spec.hidden_size * spec.vocab_size
    return costs


def _best_ends(costs: list[int], num_stages: int, later: frozenset[int]) -> list[int]:
    """Return the end of each stage's layers. None begins with one of the `later` layers.

    Of the divisions with the smallest possible largest stage, this is one with the smallest sum of squares, so that the
    other stages are even, too.
    """
    sums = [0, *accumulate(costs)]
    largest = _least(sums, num_stages, later, lambda so_far, stage: max(so_far, stage))[0]
    return _least(sums, num_stages, later, lambda so_far, stage: so_far + stage**2, limit=largest)[1]


def _least(
    sums: list[int],
    num_stages: int,
    later: frozenset[int],
    combine: Callable[[int, int], int],
    limit: float = math.inf,
) -> tuple[int, list[int]]:
    """Return the least value of a division, and the ends of its stages. No stage may cost more than `limit`.

    Args:
        sums: the cost of the first n layers, for each n from 0 on.
        later: layers with which no stage begins.
        combine: the value of some stages and of one more, from their value and the cost of that stage.
    """
    best: dict[int, tuple[int, list[int]]] = {0: (0, [])}
    for _ in range(num_stages):
        longer: dict[int, tuple[int, list[int]]] = {}
        for end in range(1, len(sums)):
            found = [
                (combine(value, sums[end] - sums[start]), [*ends, end])
                for start, (value, ends) in best.items()
                if start < end and start not in later and sums[end] - sums[start] <= limit
            ]
            if found:
                longer[end] = min(found)
        best = longer
    return best[len(sums) - 1]
