"""How a model's layers are divided over the stages of a pipeline.

Stages compute at the same time, each another step, so the slowest one determines the throughput. The first stage has
the embedding, too, which takes next to no time, and the last one the head.
"""

from __future__ import annotations

__all__ = ["Stage", "layer_costs", "split_layers"]

import math
from collections.abc import Callable, Collection
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
    why = spec.why_not("stages") if num_stages > 1 else None
    if why is not None:
        raise InvalidConfig(
            f"pipeline_parallel_size={num_stages} can't be used with {spec.architecture}, which {why}: use "
            "tensor_parallel_size instead"
        )
    later = frozenset(layer for layer, mixer in enumerate(spec.mixers) if mixer.needs_layer_before)
    possible = _possible_ends(spec)
    if layer_counts is None and num_stages <= spec.num_layers - len(later):
        ends = _best_ends(layer_costs(spec), num_stages, possible - later)
        if not ends:
            raise InvalidConfig(
                f"pipeline_parallel_size={num_stages} is more than {spec.architecture} can be divided into: layers "
                f"that share keys and values are in one stage, so stages may end after {sorted(possible)} layers. Use "
                "fewer stages"
            )
    elif layer_counts is None:
        selecting = [layer for layer in range(spec.num_layers) if layer not in later]
        raise InvalidConfig(
            f"pipeline_parallel_size={num_stages} is more than the {len(selecting)} layers of the model that select "
            f"tokens ({', '.join(map(str, selecting))}), with one of which each stage begins: use fewer stages"
        )
    elif len(layer_counts) == num_stages and sum(layer_counts) == spec.num_layers and min(layer_counts) > 0:
        ends = list(accumulate(layer_counts))
    else:
        raise InvalidConfig(
            f"pipeline_layers={','.join(map(str, layer_counts))} doesn't divide the model's {spec.num_layers} layers "
            f"over pipeline_parallel_size={num_stages} stages: give the number of layers of each stage, at least 1"
        )
    if not possible.issuperset(ends):
        raise InvalidConfig(
            f"pipeline_layers={','.join(map(str, layer_counts or []))} divides layers of {spec.architecture} "
            f"that share keys and values: stages may end after {sorted(possible)} layers"
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


def _possible_ends(spec: ModelSpec) -> set[int]:
    """Return the numbers of first layers after which a stage may end: what a layer reads is in its own stage."""
    reads = [(mixer.kept_by(layer), layer) for layer, mixer in enumerate(spec.mixers)]
    return {end for end in range(1, spec.num_layers + 1) if not any(kept < end <= layer for kept, layer in reads)}


def _best_ends(costs: list[int], num_stages: int, possible: Collection[int]) -> list[int]:
    """Return the end of each stage's layers, all of them among `possible`. Empty: there is no such division.

    Of the divisions with the smallest possible largest stage, this is one with the smallest sum of squares, so that the
    other stages are even, too.
    """
    sums = [0, *accumulate(costs)]
    largest, ends = _least(sums, num_stages, possible, lambda so_far, stage: max(so_far, stage))
    if not ends:
        return []
    return _least(sums, num_stages, possible, lambda so_far, stage: so_far + stage**2, limit=largest)[1]


def _least(
    sums: list[int],
    num_stages: int,
    possible: Collection[int],
    combine: Callable[[int, int], int],
    limit: float = math.inf,
) -> tuple[int, list[int]]:
    """Return the least value of a division, and the ends of its stages. No stage may cost more than `limit`.

    There are no ends if there is no division.

    Args:
        sums: the cost of the first n layers, for each n from 0 on.
        possible: where stages may end.
        combine: the value of some stages and of one more, from their value and the cost of that stage.
    """
    best: dict[int, tuple[int, list[int]]] = {0: (0, [])}
    for _ in range(num_stages):
        longer: dict[int, tuple[int, list[int]]] = {}
        for end in sorted(possible):
            found = [
                (combine(value, sums[end] - sums[start]), [*ends, end])
                for start, (value, ends) in best.items()
                if start < end and sums[end] - sums[start] <= limit
            ]
            if found:
                longer[end] = min(found)
        best = longer
    return best.get(len(sums) - 1, (0, []))
