"""Mamba-2's recurrence in plain torch and by native kernels."""

from __future__ import annotations

from functools import partial

import hypothesis
import pytest
import torch
from mamba2_contract import MAMBA2
from state_contract import MIXED, Batch, Make, Sequence, Sizes, assert_same_bits, sizes
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as reference

from raycore.kernels import library
from raycore.state.mamba2 import TorchMamba2
from raycore.state.native import NativeMamba2

INVARIANT: list[Make] = [partial(TorchMamba2, batch_invariant=True)]
if library.load() is not None:
    INVARIANT.append(NativeMamba2)
IMPLEMENTATIONS: list[Make] = [TorchMamba2, *INVARIANT]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("make", IMPLEMENTATIONS)
@hypothesis.settings(max_examples=30)
@hypothesis.given(sizes(MAMBA2, DTYPES, longest=200, largest_dim=256))
def test_mamba2_equals_its_definition(make: Make, sizes: Sizes) -> None:
    batch = Batch(sizes)
    batch.check(batch.outcome(make))


@pytest.mark.parametrize("make", IMPLEMENTATIONS)
def test_a_step_of_all_kinds_of_sequences_equals_the_definition(make: Make) -> None:
    batch = Batch(Sizes(MAMBA2, MIXED, num_k_heads=2, group=2, k_dim=32, v_dim=48, has_options=True))
    batch.check(batch.outcome(make))


@pytest.mark.parametrize("shape", [{"k_dim": 24}, {"num_k_heads": 3, "group": 2, "v_dim": 40}, {"k_dim": 256}])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", INVARIANT)
def test_a_token_has_the_same_bits_whatever_else_is_computed(
    make: Make, dtype: torch.dtype, shape: dict[str, int]
) -> None:
    assert_same_bits(make, Sizes(MAMBA2, MIXED, dtype=dtype, **shape))


def test_prompts_equal_those_of_transformers() -> None:
    sizes = Sizes(MAMBA2, (Sequence(130),), num_k_heads=2, group=2, k_dim=32, v_dim=24, has_options=True)
    batch = Batch(sizes)
    shape, layer = sizes.shape, batch.layer
    channels_TC, times_TN = batch.x_TX.split([shape.num_channels, 4], 1)
    convolved = reference.causal_conv1d_fn(channels_TC.T[None], layer.conv_CW, layer.conv_bias_C, activation="silu")
    x, b, c = (
        part.reshape(1, 130, -1, dim)
        for part, dim in zip(convolved[0].T.split([96, 64, 64], 1), (24, 32, 32), strict=True)
    )
    out, state = reference.mamba2_chunk_scan(
        x,
        times_TN[None],
        -layer.decay_N.exp(),
        b,
        c,
        chunk_size=32,
        D=layer.skip_N,
        dt_bias=layer.bias_N,
        dt_softplus=True,
        dt_limit=(shape.least_time, shape.longest_time),
        return_final_states=True,
    )
    for make in IMPLEMENTATIONS:
        found = batch.outcome(make)
        row = batch.step.sequences_n4[0, 3]
        torch.testing.assert_close(found.out_TX.view(out.shape), out, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found.states_RNKH[row], state[0].transpose(1, 2), atol=1e-5, rtol=1e-5)


def test_a_step_without_tokens_changes_nothing() -> None:
    batch = Batch(Sizes(MAMBA2, ()))
    for make in IMPLEMENTATIONS:
        batch.check(batch.outcome(make))
