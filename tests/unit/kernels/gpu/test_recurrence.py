"""Triton's kernels of layers that keep a state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from delta_contract import DELTA, TURNING_DELTA
from interpreted_triton import DEVICE, DTYPES
from mamba2_contract import MAMBA2
from state_contract import Batch, Make, Rule, Sequence, Sizes, assert_same_bits

from raycore.kernels.gpu.recurrence import unsupported_reason
from raycore.kernels.state_tables import StateTables, state_tables
from raycore.state.gpu import TritonDelta, TritonMamba2

KINDS = pytest.mark.parametrize(("rule", "make"), [(DELTA, TritonDelta), (MAMBA2, TritonMamba2)])
SMALL = (
    Sequence(1, 0),
    Sequence(1),
    Sequence(1, 0),
    Sequence(11, 1, (1, 2, 9), is_in_place=True),
    Sequence(4, 2, (1, 2, 3), saves_in_place=True),
    Sequence(3, 0),
)
"""The interpreter takes a millisecond for each operation."""


@KINDS
@pytest.mark.parametrize(
    "shape",
    [
        {"num_k_heads": 2, "group": 2, "dtype": DTYPES[-1]},
        {"k_dim": 24, "v_dim": 40, "conv_size": 2, "has_options": True, "decay": 5.0},
        {"group": 3, "v_dim": 8, "conv_size": 3, "has_options": True, "decay": -3.0},
    ],
)
def test_triton_equals_the_definition(rule: Rule, make: Make, shape: dict[str, Any]) -> None:
    batch = Batch(Sizes(rule, SMALL, **shape))
    batch.check(batch.outcome(make, DEVICE))


def test_triton_turns_states_over() -> None:
    batch = Batch(Sizes(TURNING_DELTA, SMALL[2:], num_k_heads=2))
    batch.check(batch.outcome(TritonDelta, DEVICE))


@KINDS
def test_triton_takes_the_largest_heads(rule: Rule, make: Make) -> None:
    batch = Batch(Sizes(rule, SMALL[2:4], k_dim=256, v_dim=24, conv_size=2, has_options=True))
    batch.check(batch.outcome(make, DEVICE))


@KINDS
def test_a_token_has_the_same_bits_whatever_else_triton_computes(rule: Rule, make: Make) -> None:
    assert_same_bits(make, Sizes(rule, SMALL[2:4], group=2, v_dim=24), DEVICE)


@KINDS
def test_triton_takes_tables_with_padding(rule: Rule, make: Make) -> None:
    """Rows without tokens write nothing, and tokens of no sequence give zeros."""
    batch = Batch(Sizes(rule, SMALL[:3]))
    expected = batch.outcome(make, DEVICE)
    padding_34 = np.array([[3, 0, -1, 0]] * 3, np.int32)
    sequences, tiles, starts, saves = state_tables(batch.step.sequences_n4, batch.step.saves_S3)
    arrays = [
        np.concatenate([sequences, padding_34]),
        np.concatenate([tiles, [[3, 0], [4, 0], [5, 0]]]).astype(np.int32),
        np.pad(starts, (0, 3)),
        saves,
    ]
    batch.step = replace(batch.step, tables=StateTables(*(torch.as_tensor(array).to(DEVICE) for array in arrays)))
    batch.x_TX = torch.cat([batch.x_TX, torch.full((3, batch.x_TX.shape[1]), torch.nan)])
    found = batch.outcome(make, DEVICE)
    assert torch.equal(found.out_TX[:3], expected.out_TX)
    assert not found.out_TX[3:].any()
    assert torch.equal(found.states_RNKH.nan_to_num(9.0), expected.states_RNKH.nan_to_num(9.0))
    assert torch.equal(found.conv_states_RCW.nan_to_num(9.0), expected.conv_states_RCW.nan_to_num(9.0))


def test_the_tables_of_a_step_have_a_tile_for_every_eight_tokens() -> None:
    sequences_n4 = np.array([[0, 1, 4, 5], [3, 17, -1, 6], [20, 8, 2, 7]], np.int32)
    saves_S3 = np.array([[1, 3, 8], [1, 16, 9], [2, 7, 1]], np.int32)
    sequences, tiles, starts, saves = state_tables(sequences_n4, saves_S3)
    assert sequences.tolist() == sequences_n4.tolist()
    assert tiles.tolist() == [[0, 0], [1, 0], [1, 8], [1, 16], [2, 0]]
    assert starts.tolist() == [0, 0, 2, 3]
    assert saves.tolist() == [[3, 8], [16, 9], [7, 1]]


def test_sizes_that_the_kernels_lack_are_named() -> None:
    assert unsupported_reason(256, torch.float16) is None
    assert "257 rows" in str(unsupported_reason(257, torch.float32))
    assert "float64" in str(unsupported_reason(128, torch.float64))
