"""Streams of hidden states, and gates of which few numbers are left, compared with their formulas."""

from __future__ import annotations

from pathlib import Path
from statistics import NormalDist

import pytest
import torch
from layer_places import place_of, random_part
from model_specs import spec_of
from test_sums_in_parts import on_ranks, own_part
from torch.nn import functional
from transformers.models.gemma3n.configuration_gemma3n import Gemma3nTextConfig
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP

from raycore.layers.handed import Handed
from raycore.layers.streams import StreamsFeedForward

CONFIG = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 6,
    "altup_num_inputs": 3,
    "altup_active_idx": 1,
    "laurel_rank": 5,
    "activation_sparsity_pattern": [0.7, 0.0],
}


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight, 1e-6)


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_streams_are_predicted_and_corrected(tmp_path: Path, num_tokens: int) -> None:
    torch.manual_seed(0)
    spec, handed = spec_of(tmp_path, "Gemma3nForCausalLM", **CONFIG), Handed()
    weights = random_part(spec, spec.feed_forwards[1])
    part = StreamsFeedForward(place_of(spec, 1, handed), weights)
    h_TSD, out_TD, inputs_TLP = (torch.randn(num_tokens, *size) for size in ((3, 32), (32,), (2, 6)))
    handed.begin(inputs_TLP)

    def modalities(x_TD: torch.Tensor) -> torch.Tensor:
        return torch.tanh(normed(x_TD, weights.router_norm_D) / 32 @ weights.router_SD.t())

    factors_TSS = (modalities(h_TSD[:, 1]) @ weights.prediction_XS.t()).view(-1, 3, 3)
    predicted_TSD = torch.einsum("tji,tid->tjd", factors_TSS, h_TSD) + h_TSD
    torch.testing.assert_close(part.predicted(h_TSD.flatten(1)), predicted_TSD)
    factors_TS = modalities(out_TD) @ weights.correction_SS.t() + 1
    expected_TSD = predicted_TSD + factors_TS[:, :, None] * (out_TD - predicted_TSD[:, 1])[:, None]
    active_TD = expected_TSD[:, 1] * weights.active_scale_D
    gated_TP = functional.gelu(active_TD @ weights.input_gate_PD.t(), approximate="tanh") * inputs_TLP[:, 1]
    expected_TSD[:, 1:] += normed(gated_TP @ weights.input_out_DP.t(), weights.input_norm_D)[:, None]
    torch.testing.assert_close(part.corrected(predicted_TSD, out_TD), expected_TSD.flatten(1))
    laurel_TD = out_TD + normed(out_TD @ weights.left_RD.t() @ weights.right_DR.t(), weights.laurel_norm_D)
    torch.testing.assert_close(part.laurel(out_TD), laurel_TD)
    for field, each in vars(part.weights()).items():
        if each is not None:
            torch.testing.assert_close(each, getattr(weights, field))


def test_few_numbers_of_a_gate_are_left(tmp_path: Path) -> None:
    torch.manual_seed(0)
    spec = spec_of(tmp_path, "Gemma3nForCausalLM", **CONFIG)
    weights, x_TD = random_part(spec, spec.feed_forwards[0]), torch.randn(4, 32)
    part = StreamsFeedForward(place_of(spec, 0), weights)
    gate_TF, up_TF = (x_TD @ weights.gate_up_FD.t()).chunk(2, 1)
    bound_T1 = gate_TF.mean(1, keepdim=True) + NormalDist().inv_cdf(0.7) * gate_TF.std(1, correction=0, keepdim=True)
    left_TF = functional.relu(gate_TF - bound_T1)
    assert 0 < left_TF.count_nonzero() < left_TF.numel() / 2
    expected_TD = (functional.gelu(left_TF, approximate="tanh") * up_TF) @ weights.down_DF.t()
    torch.testing.assert_close(part.apply(x_TD), expected_TD)


def test_a_gate_in_16_bits_is_rounded_as_in_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    spec = spec_of(tmp_path, "Gemma3nForCausalLM", **CONFIG | {"intermediate_size": 1024})
    reference = Gemma3nTextMLP(Gemma3nTextConfig(**CONFIG | {"intermediate_size": 1024}), 0).bfloat16()
    linears = (reference.gate_proj, reference.up_proj, reference.down_proj)
    weights = random_part(spec, spec.feed_forwards[0])
    for field, each in vars(weights).items():
        if each is not None:
            setattr(weights, field, each.bfloat16())
    with torch.no_grad():
        for linear, weight in zip(linears, (*weights.gate_up_FD.chunk(2), weights.down_DF), strict=True):
            linear.weight.copy_(weight)
        x_TD = torch.randn(64, 32).bfloat16()
        gate_TF = reference._gaussian_topk(reference.gate_proj(x_TD))
    part = StreamsFeedForward(place_of(spec, 0), weights)
    sparse = part.gate_up._linear
    found_TF = sparse(x_TD).chunk(2, 1)[0]
    assert ((found_TF > 0) != (gate_TF > 0)).float().mean() < 1e-4
    torch.testing.assert_close(found_TF, gate_TF)


def test_gates_have_the_same_bits_on_any_number_of_ranks(tmp_path: Path) -> None:
    torch.manual_seed(0)
    spec, x_TF = spec_of(tmp_path, "Gemma3nForCausalLM", **CONFIG), torch.randn(5, 4096)

    def sums(num_ranks: int) -> list[torch.Tensor]:
        operations = place_of(spec, 0, batch_invariant=True).operations
        return on_ranks(
            num_ranks,
            lambda ranks: torch.cat(
                [operations.sums_over_ranks(own_part(x_TF, ranks), ranks, squared=each) for each in (False, True)], 1
            ),
        )

    (alone,) = sums(1)
    torch.testing.assert_close(alone, torch.stack([x_TF.sum(1), x_TF.square().sum(1)], 1), atol=1e-3, rtol=1e-5)
    for num_ranks in (2, 4):
        assert all(torch.equal(each, alone) for each in sums(num_ranks))
