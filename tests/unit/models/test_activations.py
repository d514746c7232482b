"""Activations have one table of names, of which each part of a model knows some."""

from __future__ import annotations

from typing import get_args

import pytest
from torch import arange
from transformers.activations import ACT2FN

from raycore.errors import InvalidCheckpoint
from raycore.json_fields import JsonFields
from raycore.layers.gate import ACTIVATIONS
from raycore.models.activations import read_activation
from raycore.models.spec import GateName
from raycore.parts.pooling.models.pooling import ActivationName

KNOWN = {*get_args(GateName), *get_args(ActivationName)}


@pytest.mark.parametrize(
    "name", ["silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2", "tanh", "sigmoid"]
)
def test_an_activation_computes_what_transformers_calls_so(name: str) -> None:
    x = arange(-4.0, 4.0, 0.25)[None]
    found = read_activation(JsonFields("config.json", {"act": name}), "act", KNOWN)
    assert (ACTIVATIONS[found](x.clone()) - ACT2FN[name](x)).abs().max() < 1e-6


@pytest.mark.parametrize("value", ["mish", "relu", None, ["silu"]])
def test_others_than_the_known_ones_are_refused(value: object) -> None:
    fields = JsonFields("config.json", {"act": value})
    known = "one of silu, swish, gelu, gelu_pytorch_tanh, gelu_new, gelu_fast, relu2"
    with pytest.raises(InvalidCheckpoint, match=known):
        read_activation(fields, "act", get_args(GateName))
