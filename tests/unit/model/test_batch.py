"""How plans move the arrays by slot."""

from __future__ import annotations

import numpy as np
import pytest
from small_model import int32, new_request, plan

from raycore.messages import StepPlan
from raycore.model.batch import SlotBatch


@pytest.fixture
def batch() -> SlotBatch:
    batch = SlotBatch(num_slots=4, max_model_len=16, block_size=4)
    batch.apply(plan([], new_requests=[new_request(1, [7, 8, 9], [5]), new_request(3, [1, 2, 3, 4, 5], [6, 0], 4)]))
    return batch


def test_tokens_are_laid_out_slot_after_slot(batch: SlotBatch) -> None:
    step = batch.advance(plan([3, 1], [1, 2]))
    assert step.num_decodes == 1
    assert step.token_slots.tolist() == [3, 1, 1]
    assert step.positions.tolist() == [4, 0, 1]
    assert step.token_ids.tolist() == [5, 7, 8]
    assert step.sampled.tolist() == [0]
    assert step.last_rows.tolist() == [0, 2]


def test_sampled_tokens_are_the_next_steps_input(batch: SlotBatch) -> None:
    batch.advance(plan([3, 1], [1, 3]))
    batch.append_tokens(np.array([3, 1]), np.array([70, 71], np.int32))
    step = batch.advance(plan([1, 3]))
    assert step.token_ids.tolist() == [71, 70]
    assert step.positions.tolist() == [3, 5]
    assert step.sampled.tolist() == [0, 1]


def test_blocks_are_appended_in_order_also_several_to_a_slot(batch: SlotBatch) -> None:
    version = batch.advance(plan([3])).tables_version
    batch.apply(StepPlan(1, new_block_slots=int32([1, 3, 1]), new_block_ids=int32([11, 12, 13])))
    assert batch.block_tables[1, :3].tolist() == [5, 11, 13]
    assert batch.block_tables[3, :3].tolist() == [6, 0, 12]
    assert batch.advance(plan([1], [1])).tables_version != version


def test_a_slot_is_taken_over_in_the_step_that_frees_it(batch: SlotBatch) -> None:
    batch.apply(plan([], freed_slots=[1], new_requests=[new_request(1, [40, 41], [2])]))
    assert batch.advance(plan([1], [2])).token_ids.tolist() == [40, 41]
    assert batch.num_prompt[1] == 2
