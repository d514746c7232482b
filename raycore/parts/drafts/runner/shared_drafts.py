"""Drafts that one of the workers makes that verify them together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from raycore.parts.drafts.guesses.drafts import Drafts
from raycore.step.batch import Ints


class ShareDrafts(Protocol):
    """Tells other workers of drafts."""

    def __call__(self, drafts: Drafts, slots: Ints, limits: Ints) -> Drafts:
        """Return the drafts that all workers go on with. All must call this at the same time.

        Args:
            drafts: this worker's.
            slots: [n], ascending: the slots that may have drafts.
            limits: [n]: their maximum lengths.
        """
        ...


def own_drafts(drafts: Drafts, slots: Ints, limits: Ints) -> Drafts:
    """Return the drafts: all workers make the same ones."""
    return drafts


class DraftsOfFirst:
    """All workers go on with the drafts of the first one. Implements `ShareDrafts`."""

    def __init__(self, of_first: Callable[[Tensor], Tensor], device: torch.device) -> None:
        """`of_first`: returns the first worker's of the tensors that all call it with."""
        self._of_first = of_first
        self._device = device

    def __call__(self, drafts: Drafts, slots: Ints, limits: Ints) -> Drafts:
        table = np.zeros((len(slots), 1 + int(limits.max())), np.int32)
        rows, width = np.searchsorted(slots, drafts.slots), drafts.padded_ids.shape[1]
        table[rows, 0], table[rows, 1 : 1 + width] = drafts.lengths, drafts.padded_ids
        first = self._of_first(torch.as_tensor(table, device=self._device)).cpu().numpy()
        return Drafts(slots, first[:, 0].astype(np.int64), first[:, 1:]).shortened(first[:, 0])
