"""Layers with several streams of hidden states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from families import make_checkpoint
from layer_places import place_of, random_layout
from model_specs import spec_of
from torch import Tensor

from raycore.checkpoint.model_spec import load_model_spec
from raycore.checkpoint.stored_model import fit_model
from raycore.decoder.streams import StreamsDecoder, StreamsLayer
from raycore.layers.handed import Handed
from raycore.layers.operations import Operations
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.weights.worker.in_place import weight_tensors
from raycore.step.batch import StepInputs
from raycore.step.device_batch import StepTensors
from raycore.weights.loader import load_decoder_weights
from raycore.weights.share import WeightShare

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


def test_a_network_keeps_nothing_of_a_step(tmp_path: Path) -> None:
    path = make_checkpoint("gemma3n", tmp_path)
    spec = fit_model(load_model_spec(path), path)
    weights = load_decoder_weights(WeightShare(spec, torch.float32), path)
    network = StreamsDecoder(spec, weights, TensorParallel(), Operations(torch.device("cpu")))
    before = weight_tensors(network).keys()
    for rows_R in (None, torch.tensor([2])):
        assert len(network.forward(torch.arange(3), QueriesBack(), rows_R)) == (3 if rows_R is None else 1)
        assert weight_tensors(network).keys() == before
