from __future__ import annotations

from typing import Any

import numpy as np
import torch
from drafts_by_slot import by_slot
from torch import Tensor

from raycore.parts.drafts.guesses.drafts import NO_DRAFTS, Drafts
from raycore.parts.drafts.runner.shared_drafts import DraftsOfFirst, own_drafts

SLOTS, LIMITS = np.array([1, 4, 6]), np.array([2, 3, 1])


class Ranks:
    """Two workers, the first of which has sent its tensor already."""

    def __init__(self, sent: list[Tensor]) -> None:
        self._sent = sent

    def all_gather(self, x: Tensor) -> list[Tensor]:
        self._sent.append(x)
        assert x.shape == self._sent[0].shape
        return self._sent


def test_all_workers_go_on_with_the_drafts_of_the_first_one() -> None:
    sent: list[Tensor] = []
    ranks: Any = Ranks(sent)
    share = DraftsOfFirst(ranks, torch.device("cpu"))
    first = Drafts.of([1, 6], [[7, 8], [9]])
    for own in (first, NO_DRAFTS):
        assert by_slot(share(own, SLOTS, LIMITS)) == {1: [7, 8], 6: [9]}
    assert own_drafts(first, SLOTS, LIMITS) is first
