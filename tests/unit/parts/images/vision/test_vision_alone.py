"""The network without layers gives each row that is asked for something that nobody reads."""

from __future__ import annotations

import msgspec
import torch
from small_model import CPU, SPEC

from raycore.attention.spec import NoAttention
from raycore.layers.operations import Operations
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.images.vision.alone import NoLayers
from raycore.weights.loader import random_decoder_weights
from raycore.weights.share import WeightShare


def test_rows_are_those_that_are_asked_for() -> None:
    spec = msgspec.structs.replace(SPEC, encodes_only=True, num_layers=0, layer_windows=[], rotations=[], moe=None)
    weights = random_decoder_weights(WeightShare(spec, torch.float32))
    assert (weights.embed_VD, weights.lm_head_VD, weights.final_norm_D, weights.layers) == (None, None, None, [])
    network = NoLayers(spec, weights, TensorParallel(), Operations(CPU))
    token_ids_T, kept_R = torch.tensor([3, 1, 2]), torch.tensor([2])
    embedded_TD = network.vocabulary.embed(token_ids_T)
    embedded_TD[1] = 5.0  # an image's
    taps = {1: lambda hidden_TD: None}  # deepstack's
    assert network.forward(token_ids_T, NoAttention(), kept_R, taps=taps).shape == (1, spec.hidden_size)
    assert network.forward(embedded_TD, NoAttention(), taps=taps).shape == (3, spec.hidden_size)
    assert list(network.parts()) == []
