"""Which rows a step reads and writes. Random plans are in `tests/unit/scheduler`, with `FakeStates`."""

from __future__ import annotations

import numpy as np
import pytest
from fake_engine_core import _step_inputs
from small_model import int32, new_request, plan

from raycore.messages import StatePlan, StepTokens
from raycore.state.slot_rows import RowsOfStep, SlotRows
from raycore.state.spec import FROM_ZERO


def begin(rows: SlotRows, starts: list[int], counts: list[int], made) -> RowsOfStep:
    rows.apply(made)
    slots = np.frombuffer(made.slots, np.int32).tolist()
    sampled = [0] * len(slots) if made.tokens is None else np.frombuffer(made.tokens.num_sampled, np.int32).tolist()
    drafts = {slot: max(number - 1, 0) for slot, number in zip(slots, sampled, strict=True)}
    known = {
        slot: [1] * (start + count + (number == 0))
        for slot, start, count, number in zip(slots, starts, counts, sampled, strict=True)
    }
    return rows.begin(_step_inputs(made, starts, counts, known, drafts))


def test_a_request_begins_with_zeros_and_goes_on_in_its_slots_row() -> None:
    rows = SlotRows(4, 1)
    first = begin(rows, [0], [5], plan([2], [5], new_requests=[new_request(2, [1] * 5, [0])]))
    assert first.step.sequences_n4.tolist() == [[0, 5, FROM_ZERO, 2]]
    new = new_request(1, [1] * 9, [0], num_computed=8)
    states = StatePlan(int32([1, 7]), b"")
    second = begin(rows, [5, 8], [1, 1], plan([2, 1], new_requests=[new], states=states))
    assert second.step.sequences_n4.tolist() == [[0, 1, 2, 2], [1, 1, 7, 1]]
    assert (second.step.num_decodes, len(second.step.saves_S3)) == (2, 0)
    again = begin(rows, [0], [3], plan([2], [3], freed_slots=[2], new_requests=[new_request(2, [1] * 3, [0])]))
    assert again.step.sequences_n4.tolist() == [[0, 3, FROM_ZERO, 2]]


def test_states_of_prefixes_are_kept_before_and_within_a_step() -> None:
    rows = SlotRows(2, 1)
    new = [new_request(slot, [1] * 20, [0]) for slot in (0, 1)]
    states = StatePlan(b"", int32([1, 12, 5, 0, 8, 3, 0, 4, 2]))
    first = begin(rows, [0, 0], [9, 16], plan([0, 1], [9, 16], new_requests=new, states=states))
    assert first.step.saves_S3.tolist() == [[0, 4, 2], [0, 8, 3], [1, 12, 5]]
    assert not first.copies_2n.size
    second = begin(rows, [9, 16], [2, 4], plan([0, 1], [2, 4], states=StatePlan(b"", int32([1, 16, 4]))))
    assert second.copies_2n.tolist() == [[1], [4]]
    assert not second.step.saves_S3.size


@pytest.mark.parametrize("num_right", range(4))
def test_the_next_step_reads_the_state_after_the_drafts_that_were_right(num_right: int) -> None:
    rows = SlotRows(3, 4)
    new = [new_request(slot, [1] * 7, [0]) for slot in (0, 2)]
    begin(rows, [0, 0], [6, 5], plan([0, 2], [6, 5], new_requests=new))
    told = StepTokens(int32([6, 5]), int32([1, 4]), int32([1] * 5))
    drafted = begin(rows, [6, 5], [1, 4], plan([0, 2], [1, 4], tokens=told))
    assert drafted.step.sequences_n4.tolist() == [[0, 1, 0, 0], [1, 4, 8, 11]]
    assert drafted.step.saves_S3.tolist() == [[1, 1, 8], [1, 2, 9], [1, 3, 10]]
    start = 6 + num_right
    keep = StatePlan(b"", int32([2, 6, 15]))
    after = begin(rows, [start], [1], plan([2], states=keep))
    assert after.step.sequences_n4.tolist() == [[0, 1, 8 + num_right, 8]]
    assert after.copies_2n.tolist() == [[8], [15]], "the state after 6 tokens is still there"


def test_a_prompt_beside_drafts_writes_one_row() -> None:
    rows = SlotRows(2, 3)
    begin(rows, [0], [2], plan([0], [2], new_requests=[new_request(0, [1, 2], [0])]))
    told = StepTokens(int32([2, 0]), int32([2, 0]), int32([1] * 7))
    new = [new_request(1, [1] * 9, [0])]
    made = begin(rows, [2, 0], [2, 5], plan([0, 1], [2, 5], new_requests=new, tokens=told))
    assert made.step.sequences_n4.tolist() == [[0, 2, 0, 1], [2, 5, FROM_ZERO, 3]]
    assert made.step.saves_S3.tolist() == [[0, 1, 0]]


def test_a_step_that_begins_where_no_state_is_fails() -> None:
    rows = SlotRows(1, 2)
    begin(rows, [0], [4], plan([0], [4], new_requests=[new_request(0, [1] * 4, [0])]))
    with pytest.raises(AssertionError, match=r"slots \[0\] have no state after \[3\] tokens"):
        begin(rows, [3], [1], plan([0]))
    with pytest.raises(AssertionError, match=r"slots \[0\] begin after tokens without a state"):
        begin(SlotRows(1, 2), [4], [1], plan([0], [1], new_requests=[new_request(0, [1] * 5, [0], num_computed=4)]))
    assert np.array_equal(begin(rows, [4], [1], plan([0])).step.sequences_n4, [[0, 1, 0, 0]])
