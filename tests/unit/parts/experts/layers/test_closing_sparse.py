"""Experts beside a dense network at the end of a layer, compared with their formula."""

from __future__ import annotations

from pathlib import Path

import torch
from gemma4_config import CONFIG, GEMMA4
from layer_places import place_of, random_part
from model_specs import spec_of
from torch import Tensor
from torch.nn import functional

from raycore.layers.handed import Handed
from raycore.parts.experts.layers.closing_sparse import ClosingSparse

EXPERTS = {
    "use_double_wide_mlp": False,
    "enable_moe_block": True,
    "num_experts": 5,
    "top_k_experts": 2,
    "moe_intermediate_size": 12,
}


def normed(x: Tensor, weight: Tensor | None) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight, 1e-6)


def network(x_TD: Tensor, gate_up_FD: Tensor, down_DF: Tensor) -> Tensor:
    gate_TF, up_TF = (x_TD @ gate_up_FD.t()).chunk(2, 1)
    return (functional.gelu(gate_TF, approximate="tanh") * up_TF) @ down_DF.t()


def test_experts_and_a_dense_network_are_normalized_and_added(tmp_path: Path) -> None:
    torch.manual_seed(0)
    spec, handed = spec_of(tmp_path, GEMMA4, **CONFIG | EXPERTS), Handed()
    weights = random_part(spec, spec.feed_forwards[3])
    part = ClosingSparse(place_of(spec, 3, handed), weights)
    h_TD, x_TD, inputs_TLP = torch.randn(4, 32), torch.randn(4, 32), torch.randn(4, 9, 6)
    handed.begin(inputs_TLP)
    routed_TD = normed(h_TD, None) * weights.router_scale_D * 32**-0.5
    scores_TE = (routed_TD @ weights.router_ED.t()).softmax(1)
    best_TK, ids_TK = scores_TE.topk(2, 1)
    factors_TK = best_TK / best_TK.sum(1, keepdim=True) * weights.scales_E[ids_TK]
    read_TD, sparse_TD = normed(h_TD, weights.experts_before_D), torch.zeros(4, 32)
    for token, (ids_K, factors_K) in enumerate(zip(ids_TK, factors_TK, strict=True)):
        for expert, factor in zip(ids_K.tolist(), factors_K, strict=True):
            own = weights.gate_up_EFD[expert], weights.down_EDF[expert]
            sparse_TD[token] += factor * network(read_TD[token : token + 1], *own)[0]
    dense_TD = network(x_TD, weights.shared_gate_up_FD, weights.shared_down_DF)
    both_TD = normed(dense_TD, weights.dense_after_D) + normed(sparse_TD, weights.experts_after_D)
    expected_TD = h_TD + normed(both_TD, weights.after_D)
    gated_TP = functional.gelu(expected_TD @ weights.input_gate_PD.t(), approximate="tanh") * inputs_TLP[:, 3]
    expected_TD = (expected_TD + normed(gated_TP @ weights.input_out_DP.t(), weights.input_norm_D)) * weights.scalar_1
    torch.testing.assert_close(part.add_to(h_TD.clone(), x_TD), expected_TD)
    # an engine without tokens takes part
    part.forward_nothing()
    again = part.weights()
    for field in ("scales_E", "router_scale_D", "experts_before_D", "after_D", "input_gate_PD", "shared_down_DF"):
        torch.testing.assert_close(getattr(again, field), getattr(weights, field))
