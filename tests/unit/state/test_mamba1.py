"""Mamba-1 in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from native_kernels import randn
from torch import Tensor
from torch.nn import functional
from transformers.models.mamba import modeling_mamba as reference

from raycore.models.mixers.mamba1 import Mamba1Spec
from raycore.state.mamba1 import Mamba1Layer
from raycore.state.recurrence import recurrence_of
from raycore.state.spec import FROM_ZERO, StateStep
from raycore.step.memory import StepLimits

NOTHING = np.zeros((0, 3), np.int32)
STEP = StateStep(
    # two read a state that stays, one begins, and one writes where it reads
    sequences_n4=np.array([[0, 1, 2, 6], [1, 1, FROM_ZERO, 3], [2, 70, 2, 4], [72, 4, 5, 5]], np.int32),
    num_decodes=2,
    saves_S3=np.array([[2, 1, 0], [2, 65, 1], [3, 1, 7]], np.int32),
)
CHANNELS, SIZE, NUM_TOKENS = 10, 6, 76
CALLS = pytest.mark.parametrize("batch_invariant", [False, True])


def spec_of(conv_size: int = 3, num_channels: int = CHANNELS) -> Mamba1Spec:
    return Mamba1Spec([True], num_channels, SIZE, 4, conv_size, has_bias=False, has_conv_bias=False)


def layer_of(conv_size: int = 3, *, has_bias: bool = True, dtype: torch.dtype = torch.float32, decay: float = 0.0):
    """A layer whose times, B and C are fixed functions of the convolution's results."""
    made_of = randn(5, CHANNELS, CHANNELS), randn(6, SIZE, CHANNELS), randn(7, SIZE, CHANNELS)

    def select(y_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # bits of a product of matrices may depend on their places
        times, b, c = (torch.stack([(each * y_C).sum(1) / 3 for y_C in y_TC.float()]) for each in made_of)
        return times.to(dtype), b.to(dtype), c.to(dtype)

    return Mamba1Layer(
        randn(1, CHANNELS, conv_size).to(dtype),
        randn(2, CHANNELS).to(dtype) if has_bias else None,
        -(randn(3, SIZE, CHANNELS) + decay).exp(),
        randn(4, CHANNELS),
        randn(8, CHANNELS),
        select,
        randn(9, 8, CHANNELS, conv_size - 1).to(dtype),
        randn(10, 8, 1, SIZE, CHANNELS),
    )


def kernels_of(
    conv_size: int = 3, *, batch_invariant: bool = False
) -> Callable[[Mamba1Layer, Tensor, StateStep], Tensor]:
    recurrence = recurrence_of(spec_of(conv_size, 2 * CHANNELS), 2)
    assert {recurrence.backend("native"), recurrence.backend("triton")} == {"torch"}
    return recurrence.kernels("torch", batch_invariant=batch_invariant)


def by_definition(layer: Mamba1Layer, x_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The results, and both states after the step, in float64."""
    conv_RCW, states_RKC = layer.conv_states_RCW.double(), layer.states_RNKH[:, 0].double()
    new_conv_RCW, new_states_RKC, outs = conv_RCW.clone(), states_RKC.clone(), list[Tensor]()
    saves = {(sequence, count): row for sequence, count, row in STEP.saves_S3.tolist()}
    for sequence, (first, num_tokens, read, write) in enumerate(STEP.sequences_n4.tolist()):
        conv_CW, state_KC = conv_RCW[read], states_RKC[read]
        if read == FROM_ZERO:
            conv_CW, state_KC = torch.zeros_like(conv_CW), torch.zeros_like(state_KC)
        saves[sequence, num_tokens] = write
        for token in range(num_tokens):
            inputs_CW = torch.cat([conv_CW, x_TC[first + token].double()[:, None]], 1)
            y_C = (inputs_CW * layer.conv_CW.double()).sum(1)
            y_C = functional.silu(y_C if layer.conv_bias_C is None else y_C + layer.conv_bias_C.double())
            times_C, b_K, c_K = (each[0].double() for each in layer.select(y_C.to(x_TC.dtype)[None]))
            times_C = functional.softplus(times_C + layer.bias_C.double())
            state_KC = state_KC * (times_C * layer.rates_KC.double()).exp() + b_K[:, None] * (times_C * y_C)
            outs.append(c_K @ state_KC + layer.skip_C.double() * y_C)
            conv_CW = inputs_CW[:, 1:]
            if (row := saves.get((sequence, token + 1))) is not None:
                new_conv_RCW[row], new_states_RKC[row] = conv_CW, state_KC
    return torch.stack(outs), new_conv_RCW, new_states_RKC


@CALLS
@pytest.mark.parametrize(
    ("conv_size", "has_bias", "decay"), [(2, False, 0.0), (3, True, 0.0), (5, True, -3.0), (4, False, 5.0)]
)
def test_a_step_of_all_kinds_of_sequences_equals_the_definition(
    conv_size: int, has_bias: bool, decay: float, batch_invariant: bool
) -> None:
    layer, x_TC = layer_of(conv_size, has_bias=has_bias, decay=decay), randn(11, NUM_TOKENS, CHANNELS)
    expected_TC, conv_RCW, states_RKC = by_definition(layer, x_TC)
    found_TC = kernels_of(conv_size, batch_invariant=batch_invariant)(layer, x_TC, STEP)
    torch.testing.assert_close(found_TC.double(), expected_TC, atol=1e-4, rtol=1e-4)
    assert torch.equal(layer.conv_states_RCW.double(), conv_RCW)
    torch.testing.assert_close(layer.states_RNKH[:, 0].double(), states_RKC, atol=1e-4, rtol=1e-4)


def test_a_prompts_blocks_are_one_recurrence(monkeypatch: pytest.MonkeyPatch) -> None:
    x_TC, whole = randn(11, NUM_TOKENS, CHANNELS), layer_of()
    expected_TC = kernels_of()(whole, x_TC, STEP)
    # blocks of seven tokens
    monkeypatch.setattr("raycore.state.mamba1.DECODE_NUMBERS", 7 * SIZE * CHANNELS)
    divided = layer_of()
    torch.testing.assert_close(kernels_of()(divided, x_TC, STEP), expected_TC, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(divided.states_RNKH, whole.states_RNKH, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_bits_whatever_else_is_computed(dtype: torch.dtype) -> None:
    whole, x_TC = layer_of(dtype=dtype), randn(11, NUM_TOKENS, CHANNELS).to(dtype)
    out_TC = kernels_of(batch_invariant=True)(whole, x_TC, STEP)
    assert out_TC.dtype == dtype
    for first, num_tokens, read, write in STEP.sequences_n4.tolist():
        alone, kernels, row = layer_of(dtype=dtype), kernels_of(batch_invariant=True), read
        for token in range(first, first + num_tokens):
            step = replace(STEP, sequences_n4=np.array([[0, 1, row, write]], np.int32), num_decodes=1, saves_S3=NOTHING)
            assert torch.equal(kernels(alone, x_TC[token : token + 1], step)[0], out_TC[token])
            row = write
        assert torch.equal(alone.states_RNKH[write], whole.states_RNKH[write])
        assert torch.equal(alone.conv_states_RCW[write], whole.conv_states_RCW[write])


@CALLS
def test_prompts_equal_those_of_transformers(batch_invariant: bool) -> None:
    layer, x_TC = layer_of(), randn(11, 90, CHANNELS)
    y_CT = reference.causal_conv1d_fn(x_TC.t()[None], layer.conv_CW, layer.conv_bias_C, activation="silu")
    times_TC, b_TK, c_TK = layer.select(y_CT[0].t())
    own = layer.rates_KC.t(), b_TK.t()[None], c_TK.t()[None]
    options = {"D": layer.skip_C, "delta_bias": layer.bias_C, "delta_softplus": True, "return_last_state": True}
    out_CT, state_CK = reference.mamba_selective_scan(y_CT, times_TC.t()[None], *own, **options)
    step = StateStep(np.array([[0, 90, FROM_ZERO, 3]], np.int32), 0, NOTHING)
    found_TC = kernels_of(batch_invariant=batch_invariant)(layer, x_TC, step)
    torch.testing.assert_close(found_TC, out_CT[0].t(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(layer.states_RNKH[3, 0], state_CK[0].t(), atol=1e-5, rtol=1e-4)


def test_a_step_without_tokens_changes_nothing() -> None:
    layer, expected = layer_of(), layer_of()
    layer = replace(layer, select=lambda y_TC: (y_TC, y_TC[:, :SIZE], y_TC[:, :SIZE]))
    step = StateStep(np.zeros((0, 4), np.int32), 0, NOTHING)
    assert kernels_of()(layer, torch.empty(0, CHANNELS), step).shape == (0, CHANNELS)
    assert torch.equal(layer.states_RNKH, expected.states_RNKH)
    assert torch.equal(layer.conv_states_RCW, expected.conv_states_RCW)


def test_ranks_need_memory_for_their_own_channels() -> None:
    limits = StepLimits(num_tokens=512, num_seqs=8, max_model_len=1024, block_size=16)
    spec = spec_of(4, 8192)
    one, two = (recurrence_of(spec, size).step_bytes(limits, 512, 4, is_native=False) for size in (1, 2))
    assert two < one < 2 * two
