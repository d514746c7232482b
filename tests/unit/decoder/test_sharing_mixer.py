"""Attention with norms of values, in layers that hand their keys and values to others."""

from __future__ import annotations

from pathlib import Path

import torch
from gemma4_config import CONFIG, GEMMA4
from layer_places import place_of, random_part
from model_specs import spec_of
from torch import Tensor
from torch.nn import functional

from raycore.decoder.sharing_mixer import SharingMixer
from raycore.layers.handed import Handed
from raycore.layers.rope import PairOrder
from raycore.step.batch import StepInputs
from raycore.step.device_batch import StepTensors


class NotesHeads:
    """Implements `Attention`: notes what it gets, and changes it."""

    def __init__(self) -> None:
        self.heads: dict[int, Tensor] = {}

    def begin(self, step: StepInputs, tensors: StepTensors) -> None: ...

    def __call__(self, layer: int, qkv_TO: Tensor, /) -> Tensor:
        self.heads[layer] = qkv_TO.clone()
        qkv_TO.zero_()
        return qkv_TO


def test_a_layer_stores_the_keys_and_values_of_its_source_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = CONFIG | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    spec, handed, noted = spec_of(tmp_path, GEMMA4, **config), Handed(), NotesHeads()
    x_TD, layers = torch.randn(3, 32), (5, 8)
    weights = {layer: random_part(spec, spec.mixers[layer]) for layer in layers}
    # they are reordered in place
    stored_OD, k_norm_H = weights[5].qkv_OD.clone(), weights[5].k_norm_H
    mixers = {layer: SharingMixer(place_of(spec, layer, handed), weights[layer]) for layer in layers}
    for layer in layers:
        mixers[layer](x_TD, noted)
    num_queries, head_dim = 4 * 16, 16
    assert (noted.heads[5][:, :num_queries] != noted.heads[8][:, :num_queries]).all()
    assert torch.equal(noted.heads[5][:, num_queries:], noted.heads[8][:, num_queries:])
    # one head, whose value is what its key is made of
    made_TH = x_TD @ stored_OD[num_queries:].t()
    keys_TH = functional.rms_norm(made_TH, (head_dim,), k_norm_H, 1e-6)
    order = PairOrder(spec.rotations[5], head_dim)
    torch.testing.assert_close(noted.heads[5][:, num_queries:-head_dim], order.pairs(keys_TH))
    torch.testing.assert_close(noted.heads[5][:, -head_dim:], functional.rms_norm(made_TH, (head_dim,), None, 1e-6))
    torch.testing.assert_close(mixers[5].weights().qkv_OD, stored_OD)
    assert mixers[8].weights().k_norm_H is None
