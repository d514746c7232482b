from __future__ import annotations

import numpy as np

from raycore.parts.drafts.guesses.drafts import NO_DRAFTS, Drafts


def test_drafts_hold_their_tokens_in_order_without_padding() -> None:
    drafts = Drafts.of([2, 3, 7], [[5, 6], [], [7, 8, 9]])
    assert drafts.lengths.tolist() == [2, 0, 3]
    assert drafts.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert drafts.offsets.tolist() == [0, 1, 0, 1, 2]


def test_drafts_are_shortened_and_empty_ones_left_out() -> None:
    drafts = Drafts.of([2, 3, 7], [[5, 6], [4], [7, 8, 9]]).shortened(np.array([2, 0, 1]))
    assert drafts.slots.tolist() == [2, 7]
    assert drafts.token_ids.tolist() == [5, 6, 7]
    assert len(drafts) == 2


def test_no_drafts_hold_no_tokens() -> None:
    assert not len(NO_DRAFTS)
    assert NO_DRAFTS.token_ids.tolist() == NO_DRAFTS.offsets.tolist() == []
