"""Inputs of layers, compared with their formula."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from gemma4_config import CONFIG, GEMMA4
from layer_places import place_of, random_part
from model_specs import spec_of
from msgspec.structs import replace

from raycore.layers.layer_inputs import LayerInputs
from raycore.models.closing import LayerInputsSpec


def test_inputs_are_of_the_token_and_of_its_embedding(tmp_path: Path) -> None:
    torch.manual_seed(0)
    # the vocabulary has more tokens than the table
    spec = replace(spec_of(tmp_path, GEMMA4, **CONFIG), layer_inputs=LayerInputsSpec(6, 60))
    assert spec.layer_inputs is not None
    weights = random_part(spec, spec.layer_inputs)
    made = LayerInputs(place_of(spec, 0), weights)
    tokens_T, h_TD = torch.tensor([3, 59, 60, 99]), torch.randn(4, 32)
    found_TLP = made(tokens_T, h_TD)
    for token, h_D, found_LP in zip(tokens_T.tolist(), h_TD, found_TLP, strict=True):
        table_LP = weights.table_VO[token if token < 60 else 0].view(9, 6) * math.sqrt(6)
        projected_LP = (weights.projection_OD @ h_D / math.sqrt(32)).view(9, 6)
        normed_LP = projected_LP / projected_LP.square().mean(1, keepdim=True).add(1e-6).sqrt() * weights.norm_P
        torch.testing.assert_close(found_LP, (table_LP + normed_LP) / math.sqrt(2))
    again = made.weights()
    torch.testing.assert_close(again.table_VO, weights.table_VO)
    torch.testing.assert_close(again.projection_OD, weights.projection_OD)


def test_streams_have_the_magnitude_of_embeddings(tmp_path: Path) -> None:
    torch.manual_seed(0)
    spec = replace(spec_of(tmp_path, GEMMA4, **CONFIG), layer_inputs=LayerInputsSpec(6, 100, num_streams=3))
    assert spec.layer_inputs is not None
    weights = random_part(spec, spec.layer_inputs)
    made, h_TD = LayerInputs(place_of(spec, 0), weights), torch.randn(4, 32)
    first_TD, *others = made.streams(h_TD).chunk(3, 1)
    torch.testing.assert_close(first_TD, h_TD)
    for other_TD, weight_DD in zip(others, weights.streams_in_XD.split(32), strict=True):
        torch.testing.assert_close(other_TD.square().mean(1), h_TD.square().mean(1))
        cosines = torch.cosine_similarity(other_TD, h_TD @ weight_DD.t())
        torch.testing.assert_close(cosines, torch.ones(4))
    streams = [torch.randn(4, 32) for _ in range(3)]
    expected_TD = streams[0].clone()
    for stream_TD, weight_DD in zip(streams[1:], weights.streams_out_XD.split(32), strict=True):
        made_TD = stream_TD @ weight_DD.t()
        expected_TD += made_TD * streams[0].norm(dim=1, keepdim=True) / made_TD.norm(dim=1, keepdim=True)
    torch.testing.assert_close(made.one_stream(torch.cat(streams, 1)), expected_TD / 3)
    torch.testing.assert_close(made.weights().streams_out_XD, weights.streams_out_XD)
