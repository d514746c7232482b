"""The gated delta rule in plain torch and by native kernels."""

from __future__ import annotations

from functools import partial

import hypothesis
import pytest
import torch
from delta_contract import DELTA, TURNING_DELTA
from state_contract import MIXED, Batch, Make, Sequence, Sizes, assert_same_bits, sizes
from torch.nn import functional
from transformers.models.qwen3_next import modeling_qwen3_next as reference

from raycore.kernels import library
from raycore.state.delta import TorchDelta
from raycore.state.native import NativeDelta

INVARIANT: list[Make] = [partial(TorchDelta, batch_invariant=True)]
if library.load() is not None:
    INVARIANT.append(NativeDelta)
IMPLEMENTATIONS: list[Make] = [TorchDelta, *INVARIANT]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("make", IMPLEMENTATIONS)
@hypothesis.settings(max_examples=30)
@hypothesis.given(sizes(DELTA, DTYPES, longest=200, largest_dim=256))
def test_the_delta_rule_equals_its_definition(make: Make, sizes: Sizes) -> None:
    batch = Batch(sizes)
    batch.check(batch.outcome(make))


@pytest.mark.parametrize("make", IMPLEMENTATIONS)
def test_a_step_of_all_kinds_of_sequences_equals_the_definition(make: Make) -> None:
    batch = Batch(Sizes(DELTA, MIXED, num_k_heads=2, group=2, k_dim=32, v_dim=48))
    batch.check(batch.outcome(make))


@pytest.mark.parametrize("make", IMPLEMENTATIONS)
def test_a_share_of_more_than_one_turns_states_over(make: Make) -> None:
    batch = Batch(Sizes(TURNING_DELTA, MIXED, num_k_heads=2, group=2, k_dim=32, v_dim=48))
    batch.check(batch.outcome(make))


@pytest.mark.parametrize("shape", [{"k_dim": 24}, {"num_k_heads": 3, "group": 2, "v_dim": 40}, {"k_dim": 256}])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", INVARIANT)
def test_a_token_has_the_same_bits_whatever_else_is_computed(
    make: Make, dtype: torch.dtype, shape: dict[str, int]
) -> None:
    assert_same_bits(make, Sizes(DELTA, MIXED, dtype=dtype, **shape))


def test_prompts_equal_those_of_transformers() -> None:
    batch = Batch(Sizes(DELTA, (Sequence(130),), num_k_heads=2, group=2, k_dim=32, v_dim=24))
    shape, layer, num_tokens = batch.sizes.shape, batch.layer, 130
    channels_TC, b_TN, a_TN = batch.x_TX.split([shape.num_channels, 4, 4], 1)
    convolved = reference.causal_conv1d_fn(channels_TC.T[None], layer.conv_CW, activation="silu")
    q, k, v = (
        part.reshape(1, num_tokens, -1, dim)
        for part, dim in zip(convolved[0].T.split([64, 64, 96], 1), (32, 32, 24), strict=True)
    )
    decays_TN = -layer.decay_N.exp() * functional.softplus(a_TN + layer.bias_N)
    for compute in (reference.torch_chunk_gated_delta_rule, reference.torch_recurrent_gated_delta_rule):
        out, state = compute(
            q, k, v, decays_TN[None], b_TN.sigmoid()[None], output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        for make in IMPLEMENTATIONS:
            found = batch.outcome(make)
            row = batch.step.sequences_n4[0, 3]
            torch.testing.assert_close(found.out_TX.view(out.shape), out, atol=2e-6, rtol=1e-5)
            torch.testing.assert_close(found.states_RNKH[row], state[0], atol=2e-6, rtol=1e-5)


def test_a_step_without_tokens_changes_nothing() -> None:
    batch = Batch(Sizes(DELTA, ()))
    for make in IMPLEMENTATIONS:
        batch.check(batch.outcome(make))
