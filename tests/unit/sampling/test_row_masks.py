"""Masks of rows, made by following grammars here: for drafts, after failures, and of requests that come and go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from counted_grammar import Counted

from raycore.errors import InvalidRequest
from raycore.sampling.row_masks import FollowedGrammars, RowMasks
from raycore.sampling_params import SamplingParams
from raycore.structured_outputs import StructuredOutputsParams

VOCAB, NUM_PROMPT = 70, 2


class Compiler:
    def matcher_of(self, asked: StructuredOutputsParams, stop_token_ids: Any = ()) -> Counted:
        if asked.regex == "(":
            raise InvalidRequest("unclosed group")
        return Counted()


class Requests:
    def __init__(self) -> None:
        compiler: Any = Compiler()
        self.grammars = FollowedGrammars(compiler, VOCAB)
        self.batch: Any = SimpleNamespace(
            token_ids=np.zeros((4, 32), np.int32), num_prompt=np.full(4, NUM_PROMPT, np.int64)
        )

    def add(self, slot: int, *output: int, regex: str = "count") -> None:
        self.batch.token_ids[slot, NUM_PROMPT : NUM_PROMPT + len(output)] = output
        self.grammars.add(slot, SamplingParams(structured_outputs=StructuredOutputsParams(regex=regex)))

    def masks(self, *rows: tuple[int, int]) -> list[list[int] | None]:
        """Which tokens may come for (slot, index of the token in its output)."""
        slots, indexes = np.array(rows, np.int64).T
        made = self.grammars.masks_of(slots, indexes + NUM_PROMPT, self.batch)
        return [allowed(made, slot, index) for slot, index in rows]

    def failed(self, *rows: tuple[int, int]) -> list[int]:
        slots, indexes = np.array(rows, np.int64).T
        return [row for row, _ in self.grammars.failed(slots, indexes + NUM_PROMPT)]


def allowed(masks: RowMasks, slot: int, index: int) -> list[int] | None:
    kept_V = masks.allowed(slot, index + NUM_PROMPT)
    return None if kept_V is None else np.flatnonzero(kept_V).tolist()


@pytest.fixture
def requests() -> Requests:
    return Requests()


def test_rows_of_several_requests_have_a_mask_each(requests: Requests) -> None:
    requests.add(0, 1, 2)
    requests.add(3)
    assert requests.masks((0, 2), (1, 5), (3, 0)) == [[3], None, [1]]


def test_no_mask_comes_after_a_draft_that_may_not_come(requests: Requests) -> None:
    requests.add(2, 1, 2, 3, 9, 5)
    assert requests.masks((2, 1), (2, 2), (2, 3), (2, 4), (2, 5)) == [[2], [3], [4], None, None]
    assert not requests.failed((2, 5)), "the draft was wrong, and not the request"
    requests.batch.token_ids[2, NUM_PROMPT + 3] = 4
    assert requests.masks((2, 4)) == [[5]]


def test_a_request_that_breaks_its_grammar_has_failed_until_that_is_taken_back(requests: Requests) -> None:
    requests.add(1, 7)
    requests.add(0)
    assert requests.masks((1, 1), (0, 0)) == [None, [1]]
    assert requests.failed((0, 0), (1, 0), (1, 1), (1, 2)) == [2, 3]
    assert requests.masks((1, 1)) == [None]
    requests.batch.token_ids[1, NUM_PROMPT] = 1
    requests.grammars.take_back_failure(1)
    assert requests.masks((1, 1)) == [[2]]


def test_what_can_not_be_compiled_has_failed_until_another_request_comes(requests: Requests) -> None:
    requests.add(1, regex="(")
    assert requests.masks((1, 0)) == [None]
    assert requests.failed((1, 0)) == [0]
    requests.grammars.remove(1)
    assert requests.masks((1, 0)) == [None]
    assert requests.failed((1, 0)) == []
    requests.add(1)
    assert requests.masks((1, 0)) == [[1]]


def test_masks_are_chosen_for_rows(requests: Requests) -> None:
    requests.add(0)
    requests.add(2, 1)
    slots, positions = np.array([2, 1, 0]), np.array([1, 0, 0]) + NUM_PROMPT
    masks = requests.grammars.masks_of(slots, positions, requests.batch)
    rows, bits_MB = masks.of_rows(np.array([0, 1, 2]), slots, positions)
    assert rows.tolist() == [0, 2]
    assert [np.flatnonzero(np.unpackbits(each, bitorder="little")).tolist() for each in bits_MB] == [[2], [1]]
