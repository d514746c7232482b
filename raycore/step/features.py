"""Where running requests have images, and what follows for the tokens of a step.

This module depends on neither torch nor the model's weights. Shape suffixes: T tokens of a step, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raycore.messages import Feature, NewRequest, StepPlan
from raycore.parts.images.models import VisionSpec

Ints = NDArray[np.int64]


class FeatureRows(NamedTuple):
    """Adjacent tokens of a step that stand for embeddings of an image."""

    identifier: str
    row: int
    """The first one's index among the step's tokens."""
    start: int
    """The first one's index among the image's tokens."""
    num_rows: int


@dataclass(slots=True)
class StepFeatures:
    """What images mean for a step's tokens."""

    rows: list[FeatureRows] = field(default_factory=list[FeatureRows])
    axes: Ints | None = None
    """[T, 3]: each token's frame, row and column, by which it is rotated. None: it is rotated by its position."""
    ends: NDArray[np.int32] | None = None
    """[T]: how many of its sequence's first tokens each token sees. None: all up to itself."""


class SlotFeatures:
    """The images in the prompts of running requests, by slot."""

    def __init__(self, spec: VisionSpec | None, num_slots: int, *, has_axes: bool) -> None:
        """
        Args:
            spec: None: the features are embeddings.
            has_axes: whether tokens are rotated by three positions.
        """
        self._spec = spec
        self._features: dict[int, list[Feature]] = {}
        """By slot, in the order of the prompt. Only of requests that have images."""
        self._axes: dict[int, Ints] | None = {} if has_axes else None
        """By slot: for each token up to the last image's, its three positions."""
        self._offset = np.zeros(num_slots, np.int64)
        """[S]: what is added to a position after the last image to get its three positions."""

    def apply(self, plan: StepPlan) -> None:
        """Apply the plan's freed slots and new requests."""
        for slot in plan.freed_slots:
            self._forget(slot)
        for request in plan.new_requests:
            self._forget(request.slot)
            if request.features:
                self._add(request)

    def of(self, slots: Ints, starts: Ints, counts: Ints, token_slots: Ints, positions: Ints) -> StepFeatures:
        """Return what images mean for a step. The arguments are those of `StepInputs`."""
        found = StepFeatures()
        if self._axes is not None:
            found.axes = np.repeat((positions + self._offset[token_slots])[:, None], 3, axis=1)
        if not self._features:
            return found
        row = 0
        for slot, start, count in zip(slots.tolist(), starts.tolist(), counts.tolist(), strict=True):
            if slot in self._features:
                self._note(found, slot, start, count, row, positions)
            row += count
        return found

    def _note(self, found: StepFeatures, slot: int, start: int, count: int, row: int, positions: Ints) -> None:
        """Add those of a slot, whose first token in the step is `row`."""
        end = start + count
        for each in self._features[slot]:
            first, last = max(each.position, start), min(each.position + each.num_tokens, end)
            if first >= last:
                continue
            found.rows.append(FeatureRows(each.identifier, row + first - start, first - each.position, last - first))
            if self._spec is not None and self._spec.is_bidirectional:
                if found.ends is None:
                    found.ends = (positions + 1).astype(np.int32)
                found.ends[row + first - start : row + last - start] = last
        if self._axes is not None and found.axes is not None:
            known = self._axes[slot]
            num_known = min(end, len(known)) - start
            if num_known > 0:
                found.axes[row : row + num_known] = known[start : start + num_known]

    def _add(self, request: NewRequest) -> None:
        self._features[request.slot] = request.features
        if self._axes is not None:
            assert self._spec is not None, "only images have axes"
            axes, offset = positions_of(self._spec, request.features)
            self._axes[request.slot], self._offset[request.slot] = axes, offset

    def _forget(self, slot: int) -> None:
        if self._features.pop(slot, None) is not None and self._axes is not None:
            del self._axes[slot]
            self._offset[slot] = 0


def positions_of(spec: VisionSpec, features: Sequence[Feature]) -> tuple[Ints, int]:
    """Return the three positions of a prompt's tokens up to the last image's, [n, 3], and what is added to later ones.

    The tokens of a text count up on all axes. An image's tokens begin at the position of the first one, and count its
    frames, rows and columns. The next token has the position after the largest one of the image's rows and columns.
    """
    parts: list[Ints] = []
    end = next_position = 0
    for each in features:
        num_before = each.position - end
        parts.append(np.repeat(np.arange(next_position, next_position + num_before)[:, None], 3, axis=1))
        next_position += num_before
        frames, rows, columns = each.grid
        sizes = frames, rows // spec.merge_size, columns // spec.merge_size
        parts.append(np.stack(np.unravel_index(np.arange(each.num_tokens), sizes), axis=1) + next_position)
        next_position += spec.num_positions_of(each.grid)
        end = each.position + each.num_tokens
    return np.concatenate(parts).astype(np.int64), next_position - end
