"""What attention within chunks hands to what attends to all keys."""

from __future__ import annotations

from itertools import pairwise

import torch
from small_model import CPU, new_request, plan
from torch import Tensor

from raycore.attention.chunked import ChunkedAttention
from raycore.step.batch import SlotBatch, StepInputs
from raycore.step.device_batch import DeviceBatch, StepTensors

BLOCK_SIZE, CHUNK = 4, 8
NUM_KNOWN = {0: 21, 1: 3, 2: 26}
"""Tokens of each slot's prompt."""


class Seen:
    """Attention that only notes its inputs."""

    step: StepInputs
    tensors: StepTensors

    def begin(self, step: StepInputs, tensors: StepTensors) -> None:
        self.step, self.tensors = step, tensors

    def __call__(self, layer: int, qkv_TO: Tensor) -> Tensor:
        return qkv_TO + layer


def divided(slots: list[int], counts: list[int], num_computed: dict[int, int], num_columns: int = 8) -> Seen:
    """Slot s has the blocks s * 10, s * 10 + 1, ..."""
    batch = DeviceBatch(SlotBatch(3, BLOCK_SIZE * num_columns - 1, BLOCK_SIZE), CPU)
    requests = [
        new_request(
            slot, [7] * NUM_KNOWN[slot], [slot * 10 + index for index in range(num_columns)], num_computed[slot]
        )
        for slot in slots
    ]
    made = plan(slots, counts, new_requests=requests)
    batch.apply(made)
    seen = Seen()
    attention = ChunkedAttention(seen, CHUNK, BLOCK_SIZE)
    attention.begin(*batch.advance(made))
    assert attention(3, torch.zeros(2)).tolist() == [3.0, 3.0]
    return seen


def test_each_chunk_is_a_sequence_of_its_own() -> None:
    # a decode at the beginning of a chunk, a short prompt, and what two chunks' ends divide
    seen = divided([2, 1, 0], [1, 3, 16], {2: 24, 1: 0, 0: 5})
    step = seen.step
    assert step.num_decodes == 1
    assert step.slots.tolist() == [0, 1, 2, 3, 4]
    assert step.starts.tolist() == [0, 0, 5, 0, 0]
    assert step.counts.tolist() == [1, 3, 3, 8, 5]
    assert step.first_rows.tolist() == [0, 1, 4, 7, 15]
    assert step.block_tables.tolist() == [[26, 27], [10, 11], [0, 1], [2, 3], [4, 5]]
    positions = [0, *range(3), 5, 6, 7, *range(8), *range(5)]
    assert step.positions.tolist() == seen.tensors.positions_T.tolist() == positions
    of_tokens = [0, 1, 1, 1, 2, 2, 2, *[3] * 8, *[4] * 5]
    assert step.token_slots.tolist() == seen.tensors.slots_T.tolist() == of_tokens
    assert seen.tensors.block_tables_SM.tolist() == step.block_tables.tolist()
    assert seen.tensors.slots_T.dtype == seen.tensors.block_tables_SM.dtype == torch.int32


def test_a_row_of_blocks_may_end_within_a_chunk() -> None:
    seen = divided([2, 0], [1, 1], {2: 25, 0: 20}, num_columns=7)
    assert seen.step.starts.tolist() == [1, 4]
    assert seen.step.block_tables.tolist() == [[26, 26], [4, 5]]
    assert seen.step.num_decodes == 2


def test_pieces_of_other_requests_or_chunks_have_other_blocks() -> None:
    batch, seen = DeviceBatch(SlotBatch(3, 31, BLOCK_SIZE), CPU), Seen()
    attention = ChunkedAttention(seen, CHUNK, BLOCK_SIZE)
    requests = [new_request(slot, [7] * 5, [slot * 10 + index for index in range(8)], 0) for slot in (0, 1)]
    versions: list[int] = []
    for made in (
        plan([0, 1], [5, 5], new_requests=requests),
        *(plan([slot], [1]) for slot in (0, 1, 1, 1, 1, 0, 1)),
    ):
        batch.apply(made)
        attention.begin(*batch.advance(made))
        versions.append(seen.step.tables_version)
    # slot 1's fourth token is the first one of its next chunk
    assert [a == b for a, b in pairwise(versions)] == [False, False, True, True, False, False, False]
