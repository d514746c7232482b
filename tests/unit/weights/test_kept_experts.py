"""Experts in integers stay as they are stored, as other linear layers do, and compute what they stand for."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_checkpoint
from native_kernels import needs_kernels
from prompt_logprobs import prompt_logprobs
from quantized_layers import FORMATS, quantize_layers

from raycore.checkpoint.model_spec import load_model_spec
from raycore.checkpoint.stored_model import fit_model
from raycore.parts.experts.weights import MoeWeights
from raycore.weights.integer_weight import IntegerWeight
from raycore.weights.linear_formats import CONVERTED, STORED_INTEGERS, LinearFormats
from raycore.weights.loader import load_decoder_weights, random_decoder_weights
from raycore.weights.share import WeightShare

FAMILY = "qwen2_moe"
"""Its experts are beside shared ones, and some layers have none."""
SIZES = {
    FAMILY: {"shared_expert_intermediate_size": 64},
    "nemotron_h": {"moe_latent_size": 32, "moe_shared_expert_intermediate_size": 64},
}
"""So that all inputs are in whole groups."""
LARGEST_ERRORS = dict.fromkeys(FORMATS, 1e-3) | {"int8": 0.1}
"""By how much of their spread log probabilities may differ, at the median. Inputs are rounded to 16 bits, or to 8."""


def quantized(directory: Path, name: str, family: str = FAMILY) -> Path:
    path = make_checkpoint(family, directory, **SIZES[family])
    quantize_layers(path, name)
    return path


def sparse_layers(path: Path, formats: LinearFormats, rank: int = 0, size: int = 1) -> list[MoeWeights]:
    spec = fit_model(load_model_spec(path), path)
    layers = load_decoder_weights(WeightShare(spec, torch.float32, rank, size, formats=formats), path).layers
    return [layer.feed_forward for layer in layers if isinstance(layer.feed_forward, MoeWeights)]


def numbers(weight: Any) -> torch.Tensor:
    """The numbers of experts, or of another layer."""
    if weight.shape[2:]:
        return torch.stack([numbers(weight[index]) for index in range(weight.shape[0])])
    return weight.dequantize(torch.float32) if isinstance(weight, IntegerWeight) else weight


def num_bytes(weights: MoeWeights) -> int:
    tensors = [weights.gate_up_EFD, weights.down_EDF, weights.shared_gate_up_FD, weights.shared_down_DF]
    return sum(each.nbytes for weight in tensors for each in tensors_of(weight))


def tensors_of(weight: Any) -> Iterator[torch.Tensor]:
    if isinstance(weight, torch.Tensor):
        yield weight
    else:
        own = (getattr(weight, field.name) for field in dataclasses.fields(weight))
        yield from (each for each in own if isinstance(each, torch.Tensor))


@pytest.mark.parametrize("name", FORMATS)
def test_each_rank_keeps_its_part_of_experts(tmp_path: Path, name: str) -> None:
    path = quantized(tmp_path, name)
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        kept, plain = (sparse_layers(path, formats, rank, size) for formats in (STORED_INTEGERS, CONVERTED))
        for found, expected in zip(kept, plain, strict=True):
            for field in ("gate_up_EFD", "down_EDF", "shared_gate_up_FD", "shared_down_DF"):
                own = getattr(found, field)
                assert isinstance(own, IntegerWeight)
                assert own.bits == (8 if name == "int8" else 4)
                assert torch.equal(numbers(own), getattr(expected, field)), field
            assert isinstance(found.router_ED, torch.Tensor)


@pytest.mark.parametrize("name", FORMATS)
def test_kept_experts_take_the_memory_of_their_integers(tmp_path: Path, name: str) -> None:
    """Groups have 16 or 32 numbers, a scale in 32 bits and a zero in 8; where an output is a group, only 32 are one."""
    path = quantized(tmp_path, name)
    bits = {"int8": 8 + 40 / 32, "nvfp4": 4 + 40 / 16}.get(name, 4 + 40 / 32)
    for kept, plain in zip(sparse_layers(path, STORED_INTEGERS), sparse_layers(path, CONVERTED), strict=True):
        assert num_bytes(kept) <= bits / 32 * num_bytes(plain)


@needs_kernels
@pytest.mark.parametrize(("name", "family"), [*((name, FAMILY) for name in FORMATS), ("awq", "nemotron_h")])
def test_kept_experts_compute_what_converted_ones_do(tmp_path: Path, name: str, family: str) -> None:
    path = quantized(tmp_path, name, family)
    found = prompt_logprobs(path)
    expected = prompt_logprobs(path, attention_backend="torch")  # there, all are converted
    error, spread = (found - expected).abs().median(), (expected - expected.median()).abs().median()
    assert 0 < error < LARGEST_ERRORS[name] * spread


@needs_kernels
def test_inputs_of_kept_experts_are_rounded_to_8_bits_on_request(tmp_path: Path) -> None:
    path = quantized(tmp_path, "awq")
    expected, found = prompt_logprobs(path), prompt_logprobs(path, cpu_activation_dtype="int8")
    error, spread = (found - expected).abs().median(), (expected - expected.median()).abs().median()
    assert LARGEST_ERRORS["awq"] * spread < error < LARGEST_ERRORS["int8"] * spread


def test_experts_that_are_not_all_stored_alike_are_converted(tmp_path: Path) -> None:
    path = make_checkpoint(FAMILY, tmp_path)
    quantize_layers(path, "gptq", re.compile(r".*experts\.(0\.(gate|up)|\d\.down)_proj\.weight"))
    for kept, plain in zip(sparse_layers(path, STORED_INTEGERS), sparse_layers(path, CONVERTED), strict=True):
        assert isinstance(kept.gate_up_EFD, torch.Tensor)
        assert isinstance(kept.down_EDF, IntegerWeight)
        assert isinstance(kept.shared_down_DF, torch.Tensor)
        assert torch.equal(kept.gate_up_EFD, numbers(plain.gate_up_EFD))


def test_random_experts_have_the_format_that_config_names(tmp_path: Path) -> None:
    spec = load_model_spec(quantized(tmp_path, "nvfp4"))
    layers = random_decoder_weights(WeightShare(spec, torch.float32, formats=STORED_INTEGERS)).layers
    own = [layer.feed_forward for layer in layers if isinstance(layer.feed_forward, MoeWeights)]
    assert {type(each) for layer in own for each in (layer.gate_up_EFD, layer.down_EDF)} == {IntegerWeight}
