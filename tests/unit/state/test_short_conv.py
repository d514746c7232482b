"""Short convolutions in plain torch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from native_kernels import randn
from torch import Tensor
from torch.nn import functional

from raycore.models.mixers.short_conv import ShortConvSpec
from raycore.state.recurrence import recurrence_of
from raycore.state.short_conv import ShortConvLayer, TorchShortConv
from raycore.state.spec import FROM_ZERO, StateStep
from raycore.step.memory import StepLimits

STEP = StateStep(
    # two read a state that stays, one begins, and one writes where it reads
    sequences_n4=np.array([[0, 1, 2, 6], [1, 1, FROM_ZERO, 3], [2, 9, 2, 4], [11, 4, 5, 5]], np.int32),
    num_decodes=2,
    saves_S3=np.array([[2, 1, 0], [2, 5, 1], [3, 1, 7]], np.int32),
)
NUM_CHANNELS, NUM_TOKENS = 6, 15


def layer_of(conv_size: int, *, has_bias: bool, dtype: torch.dtype = torch.float32) -> ShortConvLayer:
    return ShortConvLayer(
        randn(1, NUM_CHANNELS, conv_size).to(dtype),
        randn(2, NUM_CHANNELS).to(dtype) if has_bias else None,
        randn(3, 8, NUM_CHANNELS, conv_size - 1).to(dtype),
    )


def kernels_of(conv_size: int, *, has_bias: bool) -> TorchShortConv:
    recurrence = recurrence_of(ShortConvSpec([True], 2 * NUM_CHANNELS, conv_size, has_bias), 2)
    kernels = recurrence.kernels(recurrence.backend("native"), batch_invariant=False)
    assert isinstance(kernels, TorchShortConv)
    return kernels


def by_definition(layer: ShortConvLayer, x_TC: Tensor) -> tuple[Tensor, Tensor]:
    """The results, and the states after the step."""
    conv_size, states_RCW, outs = layer.conv_CW.shape[1], layer.conv_states_RCW.clone(), list[Tensor]()
    saves = [(sequence, count, row) for sequence, count, row in STEP.saves_S3.tolist()]
    for sequence, (first, num_tokens, read, write) in enumerate(STEP.sequences_n4.tolist()):
        before_CW = layer.conv_states_RCW[read] if read != FROM_ZERO else torch.zeros(NUM_CHANNELS, conv_size - 1)
        inputs_CX = torch.cat([before_CW, x_TC[first : first + num_tokens].T], 1)
        outs.append(
            functional.conv1d(inputs_CX[None], layer.conv_CW[:, None], layer.conv_bias_C, groups=NUM_CHANNELS)[0].T
        )
        for _, count, row in [*(each for each in saves if each[0] == sequence), (sequence, num_tokens, write)]:
            states_RCW[row] = inputs_CX[:, count : count + conv_size - 1]
    return torch.cat(outs), states_RCW


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("conv_size", [2, 3, 7])
def test_a_step_of_all_kinds_of_sequences_equals_the_definition(conv_size: int, has_bias: bool) -> None:
    layer, x_TC = layer_of(conv_size, has_bias=has_bias), randn(4, NUM_TOKENS, NUM_CHANNELS)
    out_TC, states_RCW = by_definition(layer, x_TC)
    found_TC = kernels_of(conv_size, has_bias=has_bias)(layer, x_TC, STEP)
    torch.testing.assert_close(found_TC, out_TC, atol=1e-6, rtol=1e-5)
    assert torch.equal(layer.conv_states_RCW, states_RCW)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_bits_whatever_else_is_computed(dtype: torch.dtype) -> None:
    whole = layer_of(3, has_bias=True, dtype=dtype)
    x_TC = randn(4, NUM_TOKENS, NUM_CHANNELS).to(dtype)
    out_TC = kernels_of(3, has_bias=True)(whole, x_TC, STEP)
    assert out_TC.dtype == dtype
    nothing = np.zeros((0, 3), np.int32)
    for first, num_tokens, read, write in STEP.sequences_n4.tolist():
        alone, kernels, row = layer_of(3, has_bias=True, dtype=dtype), kernels_of(3, has_bias=True), read
        for token in range(first, first + num_tokens):
            step = replace(STEP, sequences_n4=np.array([[0, 1, row, write]], np.int32), num_decodes=1, saves_S3=nothing)
            assert torch.equal(kernels(alone, x_TC[token : token + 1], step)[0], out_TC[token])
            row = write
        assert torch.equal(alone.conv_states_RCW[write], whole.conv_states_RCW[write])


def test_a_step_without_tokens_changes_nothing() -> None:
    layer, expected = layer_of(3, has_bias=True), layer_of(3, has_bias=True)
    step = StateStep(np.zeros((0, 4), np.int32), 0, np.zeros((0, 3), np.int32))
    assert kernels_of(3, has_bias=True)(layer, torch.empty(0, NUM_CHANNELS), step).shape == (0, NUM_CHANNELS)
    assert torch.equal(layer.conv_states_RCW, expected.conv_states_RCW)


def test_ranks_need_memory_for_their_own_channels() -> None:
    limits = StepLimits(num_tokens=64, num_seqs=8, max_model_len=128, block_size=16)
    spec = ShortConvSpec([True], 512, 3, has_bias=False)
    one, two = (recurrence_of(spec, size).step_bytes(limits, 512, 4, is_native=False) for size in (1, 2))
    assert two < one < 2 * two
