from __future__ import annotations

import numpy as np
import pytest
from small_model import BLOCK_SIZE, MAX_MODEL_LEN, int32, new_request, plan

from raycore.messages import StepTokens
from raycore.step.batch import SlotBatch
from raycore.step.verification import verify


def make_step(*slots: tuple[list[int], int]):
    """A step, and its batch. Each slot has (tokens, how many of them a new token is sampled after)."""
    batch = SlotBatch(8, MAX_MODEL_LEN, BLOCK_SIZE)
    starts = [3 + slot for slot in range(len(slots))]
    requests = [new_request(slot, [1] * (start + 1), range(8), start) for slot, start in enumerate(starts)]
    tokens = StepTokens(int32(starts), int32([n for _, n in slots]), int32([t for each, _ in slots for t in each]))
    step_plan = plan(range(len(slots)), [len(each) for each, _ in slots], new_requests=requests, tokens=tokens)
    batch.apply(step_plan)
    return batch.advance(step_plan), batch


@pytest.mark.parametrize(
    ("sampled", "kept", "counts"),
    [
        ([5, 6, 7, 8], [0, 1, 2, 3], [1, 3]),
        ([5, 6, 9, 8], [0, 1, 2], [1, 2]),
        # what is right again behind a wrong draft doesn't count
        ([5, 9, 7, 8], [0, 1], [1, 1]),
    ],
)
def test_a_slot_keeps_what_was_sampled_up_to_its_first_wrong_draft(sampled, kept, counts) -> None:
    step, _ = make_step(([2], 1), ([4, 6, 7], 3))
    new = verify(step, np.array(sampled))
    assert new.rows.tolist() == kept
    assert new.counts.tolist() == counts


def test_slots_with_drafts_stand_beside_chunks_of_prompts() -> None:
    step, batch = make_step(([4, 6], 2), ([1, 1, 1], 0), ([4, 8, 9], 3), ([1, 1], 1))
    assert step.draft_ids is not None
    assert step.draft_ids.tolist() == [6, -1, 8, 9, -1, -1]
    new = verify(step, np.array([0, 1, 8, 9, 2, 3]))
    assert new.rows.tolist() == [0, 2, 3, 4, 5]
    assert new.counts.tolist() == [1, 0, 3, 1]
    batch.drop_drafts(step, new.counts)
    # each slot's new tokens are known, and all but the last of them are computed
    assert batch.num_computed[:4].tolist() == [4, 7, 8, 8]
    assert batch.num_known[[0, 2, 3]].tolist() == [5, 9, 9]


def test_a_step_without_drafts_keeps_every_sampled_token() -> None:
    step, _ = make_step(([4], 1), ([1, 1, 1], 0), ([1, 1], 1))
    assert step.draft_ids is None
    new = verify(step, np.array([7, 8]))
    assert new.rows.tolist() == [0, 1]
    assert new.counts.tolist() == [1, 0, 1]
