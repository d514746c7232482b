"""Layers with several streams of hidden states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from layer_places import place_of, random_layout
from model_specs import spec_of
from torch import Tensor

from raycore.decoder.streams import StreamsLayer
from raycore.layers.handed import Handed
from raycore.step.batch import StepInputs
from raycore.step.device_batch import StepTensors

CONFIG: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 6,
    "altup_num_inputs": 3,
    "laurel_rank": 5,
}


class QueriesBack:
    """Implements `Attention`: returns queries."""

    def begin(self, step: StepInputs, tensors: StepTensors) -> None: ...

    def __call__(self, layer: int, qkv_TO: Tensor, /) -> Tensor:
        return qkv_TO[:, : 4 * 8].clone()


def test_a_layer_may_end_with_some_rows_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    spec, handed = spec_of(tmp_path, "Gemma3nForCausalLM", **CONFIG), Handed()
    place, weights = place_of(spec, 1), random_layout(spec).layer(1, "")
    layer = StreamsLayer(1, 1, spec, weights, place.ranks, place.experts, place.operations, None, handed)
    h_TX, inputs_TLP = torch.randn(5, 3 * 32), torch.randn(5, 2, 6)
    handed.begin(inputs_TLP)
    all_TX = layer(h_TX.clone(), QueriesBack())
    assert all_TX.shape == h_TX.shape
    for rows in ([3], [0, 4]):
        rows_R = torch.tensor(rows)
        handed.keep_rows(rows_R)
        torch.testing.assert_close(layer(h_TX.clone(), QueriesBack(), rows_R), all_TX[rows_R])
    # each token by itself
    for row in range(5):
        handed.begin(inputs_TLP[row : row + 1])
        torch.testing.assert_close(layer(h_TX[row : row + 1].clone(), QueriesBack()), all_TX[row : row + 1])
