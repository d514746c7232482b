"""Kimi's delta attention in plain torch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import hypothesis
import pytest
import torch
from kda_contract import KDA
from state_contract import MIXED, Batch, Make, Sequence, Sizes, assert_same_bits, sizes
from torch.nn import functional
from transformers.models.kimi_linear import modeling_kimi_linear as reference

from raycore.models.mixers.kda import KdaSpec
from raycore.state.kda import TorchKda
from raycore.state.recurrence import recurrence_of
from raycore.step.memory import StepLimits

INVARIANT: Make = partial(TorchKda, batch_invariant=True)
IMPLEMENTATIONS: list[Make] = [TorchKda, INVARIANT]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("make", IMPLEMENTATIONS)
@hypothesis.settings(max_examples=30)
@hypothesis.given(sizes(KDA, DTYPES, longest=200, largest_dim=64).map(lambda each: replace(each, v_dim=each.k_dim)))
def test_the_rule_equals_its_definition(make: Make, sizes: Sizes) -> None:
    batch = Batch(sizes)
    batch.check(batch.outcome(make))


@pytest.mark.parametrize("decay", [-3.0, 0.0, 5.0])
@pytest.mark.parametrize("has_limit", [False, True])
@pytest.mark.parametrize("make", IMPLEMENTATIONS)
def test_a_step_of_all_kinds_of_sequences_equals_the_definition(make: Make, decay: float, has_limit: bool) -> None:
    batch = Batch(Sizes(KDA, MIXED, num_k_heads=2, k_dim=32, v_dim=32, decay=decay, has_options=has_limit))
    batch.check(batch.outcome(make))


@pytest.mark.parametrize("dim", [24, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_same_bits_whatever_else_is_computed(dtype: torch.dtype, dim: int) -> None:
    assert_same_bits(INVARIANT, Sizes(KDA, MIXED, dtype=dtype, num_k_heads=3, k_dim=dim, v_dim=dim))


def test_prompts_equal_those_of_transformers() -> None:
    batch = Batch(Sizes(KDA, (Sequence(130),), num_k_heads=4, k_dim=32, v_dim=32))
    layer, num_tokens = batch.layer, 130
    channels_TC, b_TN, f_TO = batch.x_TX.split([3 * 128, 4, 128], 1)
    convolved = reference.causal_conv1d_fn(channels_TC.T[None], layer.conv_CW, activation="silu")
    q, k, v = (part.reshape(1, num_tokens, 4, 32) for part in convolved[0].T.chunk(3, 1))
    decays_TNK = -layer.decay_N.exp()[:, None] * functional.softplus(f_TO + layer.bias_O).view(num_tokens, 4, 32)
    for compute in (reference.chunk_kimi_delta_attention, reference.recurrent_kimi_delta_attention):
        rates = {"g": decays_TNK[None], "beta": b_TN.sigmoid()[None]}
        options = {"initial_state": None, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        out, state = compute(q, k, v, **rates, **options)
        for make in IMPLEMENTATIONS:
            found = batch.outcome(make)
            row = batch.step.sequences_n4[0, 3]
            torch.testing.assert_close(found.out_TX.view(out.shape), out, atol=5e-6, rtol=1e-5)
            torch.testing.assert_close(found.states_RNKH[row], state[0], atol=5e-6, rtol=1e-5)


def test_a_step_without_tokens_changes_nothing() -> None:
    batch = Batch(Sizes(KDA, ()))
    for make in IMPLEMENTATIONS:
        batch.check(batch.outcome(make))


def test_plain_torch_computes_it_and_needs_memory_for_decays_between_tokens() -> None:
    recurrence = recurrence_of(KdaSpec([True], num_v_heads=32, k_dim=128, v_dim=128, conv_size=4), 2)
    assert {recurrence.backend("native"), recurrence.backend("triton")} == {"torch"}
    limits = StepLimits(num_tokens=64, num_seqs=8, max_model_len=128, block_size=16)
    # in float64 and float32, of a rank's channels
    assert recurrence.step_bytes(limits, 2304, 2, is_native=False) > 16 * 128 * 16 * 16 * (8 + 4)
