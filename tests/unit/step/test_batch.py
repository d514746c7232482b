"""How plans move the arrays by slot."""

from __future__ import annotations

import numpy as np
import pytest
from small_model import CPU, int32, new_request, plan

from raycore.messages import StepPlan, StepTokens
from raycore.step.batch import SlotBatch
from raycore.step.device_batch import DeviceBatch


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
    assert step.sampled.tolist() == [0]
    assert step.last_rows.tolist() == [0, 2]


def test_steps_of_the_same_slots_share_an_array(batch: SlotBatch) -> None:
    first, second = batch.advance(plan([3, 1], [1, 3])), batch.advance(plan([3, 1]))
    assert second.slots is first.slots
    assert second.counts.tolist() == [1, 1]
    assert second.first_rows.tolist() == [0, 1]
    assert second.num_keys == 6 + 4
    assert batch.advance(plan([1, 3])).slots.tolist() == [1, 3]


def test_a_token_counts_as_known_before_it_arrives(batch: SlotBatch) -> None:
    first = batch.advance(plan([3, 1], [1, 3]))
    second = batch.advance(plan([1, 3]))
    assert second.positions.tolist() == [3, 5]
    assert second.sampled.tolist() == [0, 1]
    batch.receive(first, np.array([70, 71]))
    batch.receive(second, np.array([81, 80]))
    assert batch.token_ids[3, :7].tolist() == [1, 2, 3, 4, 5, 70, 80]
    assert batch.token_ids[1, :5].tolist() == [7, 8, 9, 71, 81]


def test_a_token_of_an_earlier_request_is_dropped(batch: SlotBatch) -> None:
    step = batch.advance(plan([3, 1], [1, 3]))
    batch.apply(plan([], freed_slots=[1], new_requests=[new_request(1, [40, 41, 42, 43], [2])]))
    batch.receive(step, np.array([70, 71]))
    assert batch.token_ids[1, :4].tolist() == [40, 41, 42, 43]
    assert batch.token_ids[3, 5] == 70


def test_a_plan_may_give_the_tokens_and_the_positions_to_sample(batch: SlotBatch) -> None:
    told = StepTokens(int32([4, 1]), int32([1, 2]), int32([5, 8, 30, 31]))
    step = batch.advance(plan([3, 1], [1, 3], tokens=told))
    assert step.positions.tolist() == [4, 1, 2, 3]
    assert batch.token_ids[step.token_slots, step.positions].tolist() == [5, 8, 30, 31]
    assert step.sampled.tolist() == [0, 1, 1]
    assert step.sampled_slots.tolist() == [3, 1, 1]
    assert step.sampled_rows.tolist() == [0, 2, 3]
    assert step.next_positions.tolist() == [5, 3, 4]
    assert not step.is_decoding

    told = StepTokens(int32([2, 5]), int32([0, 1]), int32([9, 50]))
    step = batch.advance(plan([1, 3], tokens=told))
    assert step.positions.tolist() == [2, 5]
    assert (step.sampled.tolist(), step.sampled_rows.tolist()) == ([1], [1])


def test_blocks_are_appended_in_order_also_several_to_a_slot(batch: SlotBatch) -> None:
    version = batch.advance(plan([3])).tables_version
    indices = batch.apply(StepPlan(1, new_block_slots=int32([1, 3, 1]), new_block_ids=int32([11, 12, 13])))
    assert batch.block_tables.ravel()[indices].tolist() == [11, 12, 13]
    assert batch.block_tables[1, :3].tolist() == [5, 11, 13]
    assert batch.block_tables[3, :3].tolist() == [6, 0, 12]
    assert batch.advance(plan([1], [1])).tables_version != version


@pytest.mark.parametrize("is_shared", [True, False])
def test_groups_of_layers_have_blocks_of_their_own(is_shared: bool) -> None:
    host = SlotBatch(num_slots=4, max_model_len=16, block_size=4, num_groups=2)
    batch = DeviceBatch(host, CPU, is_shared=is_shared)
    batch.apply(plan([], new_requests=[new_request(1, [7, 8, 9], [5, 15]), new_request(3, [1] * 5, [6, 16, 7, 17])]))
    batch.apply(StepPlan(1, new_block_slots=int32([1, 3, 1]), new_block_ids=int32([8, 18, 9, 19, 10, 20])))
    assert host.num_blocks.tolist() == [0, 3, 0, 3]
    assert host.group_tables[:, 1, :3].tolist() == [[5, 8, 10], [15, 18, 20]]
    assert host.group_tables[:, 3, :3].tolist() == [[6, 7, 9], [16, 17, 19]]
    assert host.block_tables.tolist() == host.group_tables[0].tolist()
    step, tensors = batch.advance(plan([1], [2]))
    assert tensors.group_tables_GSM is not None
    assert tensors.group_tables_GSM.tolist() == host.group_tables.tolist()
    assert tensors.block_tables_SM.tolist() == step.block_tables.tolist() == host.block_tables.tolist()


def test_a_slot_is_taken_over_in_the_step_that_frees_it(batch: SlotBatch) -> None:
    batch.apply(plan([], freed_slots=[1], new_requests=[new_request(1, [40, 41], [2])]))
    step = batch.advance(plan([1], [2]))
    assert batch.token_ids[step.token_slots, step.positions].tolist() == [40, 41]
    assert batch.num_prompt[1] == 2
