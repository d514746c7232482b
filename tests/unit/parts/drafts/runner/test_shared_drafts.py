from __future__ import annotations

import numpy as np
import torch
from drafts_by_slot import by_slot
from torch import Tensor

from raycore.parts.drafts.guesses.drafts import NO_DRAFTS, Drafts
from raycore.parts.drafts.runner.shared_drafts import DraftsOfFirst, own_drafts

SLOTS, LIMITS = np.array([1, 4, 6]), np.array([2, 3, 1])


def test_all_workers_go_on_with_the_drafts_of_the_first_one() -> None:
    sent: list[Tensor] = []

    def of_first(x: Tensor) -> Tensor:
        sent.append(x)
        assert x.shape == sent[0].shape
        return sent[0]

    share = DraftsOfFirst(of_first, torch.device("cpu"))
    first = Drafts.of([1, 6], [[7, 8], [9]])
    for own in (first, NO_DRAFTS):
        assert by_slot(share(own, SLOTS, LIMITS)) == {1: [7, 8], 6: [9]}
    assert own_drafts(first, SLOTS, LIMITS) is first
