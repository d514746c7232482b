"""What each mixer declares holds for the checkpoints of its families: tensors, ranks' parts, memory and adapters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from families import auto_class, make_checkpoint
from torch import nn
from transformers import AutoConfig

from raycore.checkpoint.model_spec import load_model_spec
from raycore.checkpoint.stored_model import fit_model
from raycore.checkpoint.weight_files import stored_tensors
from raycore.class_paths import import_path
from raycore.decoder.mixer import Mixer
from raycore.models.layer_part import LayerPart, PartTensor
from raycore.models.linears import FusedLinear
from raycore.models.mixers.attention import AttentionHeads
from raycore.models.mixers.beside import BesideSpec
from raycore.models.mixers.block_selecting import BlockSelectingHeads
from raycore.models.mixers.kinds import REFUSED_ADAPTERS, StateSpec
from raycore.models.mixers.latent import LatentHeads
from raycore.models.mixers.lightning import LightningSpec
from raycore.models.mixers.mamba1 import Mamba1Spec
from raycore.models.mixers.no_mixer import NoMixer
from raycore.models.mixers.selecting import SelectingHeads
from raycore.models.mixers.sharing import SharingHeads
from raycore.models.mixers.spec import MixerSpec
from raycore.models.rows import Rows
from raycore.models.spec import ModelSpec
from raycore.parts.adapters.layers import MAX_PARTS
from raycore.state.recurrence import Recurrence
from raycore.state.state_layers import empty_states, state_bytes
from raycore.step.memory import MixerMemory
from raycore.weights.layer_part_weights import LayerPartWeights
from raycore.weights.loader import LayerWeights, empty_decoder_weights
from raycore.weights.share import WeightShare

KINDS: list[type[MixerSpec]] = [
    AttentionHeads,
    BlockSelectingHeads,
    LatentHeads,
    SelectingHeads,
    SharingHeads,
    NoMixer,
    *get_args(StateSpec),
]
FAMILIES = [
    *("qwen2", "qwen3", "phi3", "olmo2", "gpt_oss", "minimax_m3", "multi_query", "afmoe", "cohere", "stablelm"),
    *("mimo_v2_flash", "laguna", "laguna_elements", "lfm3", "gemma4", "gemma4_values"),
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"),
    *("qwen3_next", "qwen3_5", "granitemoehybrid", "granitemoehybrid_groups"),
    *("kimi_linear", "lfm2", "lfm2_moe", "nemotron_h", "bailing_hybrid"),
    *("falcon_h1", "falcon_h1_norm", "olmo_hybrid", "minimax", "mamba2"),
    *("mamba", "falcon_mamba", "jamba"),
]
"""With each kind of mixer, and with each form of its tensors."""


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelSpec]:
    path = make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    return path, fit_model(load_model_spec(path), path)


@pytest.mark.parametrize("kind", KINDS)
def test_what_computes_a_mixer_can_be_imported(kind: type[MixerSpec]) -> None:
    assert issubclass(import_path(kind.computed_by), Mixer)
    assert issubclass(import_path(kind.memory), MixerMemory)
    weights = import_path(kind.weights_class)
    assert issubclass(weights, LayerPartWeights)
    # parts of parts have weights of their own
    assert kind is BesideSpec or {field.name for field in dataclasses.fields(weights)} == set(weights.NAMES)
    assert set(weights.MULTIPLIED) <= set(weights.NAMES)
    assert len(set(weights.NAMES.values())) == len(weights.NAMES)
    assert set(kind.refused_adapters) <= set(REFUSED_ADAPTERS)
    assert bool(kind.recurrence) == (kind in get_args(StateSpec))
    assert not kind.recurrence or issubclass(import_path(kind.recurrence), Recurrence)


def test_the_tensors_that_a_mixer_declares_are_those_of_the_checkpoint(checkpoint: tuple[Path, ModelSpec]) -> None:
    path, spec = checkpoint
    # buffers of lightning attention follow from config.json
    stored = {
        name: tensor.shape
        for name, tensor in stored_tensors(path).items()
        if not name.endswith(("slope_rate", "query_decay", "key_decay", "diagonal_decay"))
    }
    for layer, mixer in enumerate(spec.mixers):
        prefix = spec.names.layer(layer)
        declared = {f"{prefix}{name}": shape for name, shape in mixer.tensors(spec).items()}
        blocks = tuple({f"{name.removeprefix(prefix).partition('.')[0]}." for name in declared})
        found = {
            name: shape for name, shape in stored.items() if name.startswith(tuple(prefix + each for each in blocks))
        }
        assert declared == found


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_the_rows_of_all_ranks_are_the_whole(checkpoint: tuple[Path, ModelSpec], tp_size: int) -> None:
    _, spec = checkpoint
    for mixer in spec.mixer_kinds:
        for layers in (mixer.linears, mixer.vectors):
            whole: tuple[FusedLinear | PartTensor, ...] = layers(spec)
            ranks: list[tuple[FusedLinear | PartTensor, ...]] = [layers(spec, rank, tp_size) for rank in range(tp_size)]
            for index, expected in enumerate(whole):
                owns = [rank[index] for rank in ranks]
                assert {each.field for each in owns} == {expected.field}
                held_parts = [part for each in owns for part in _rows(each)]
                assert {part._replace(start=0, num=0) for part in held_parts} == {
                    rows._replace(num=0) for rows in _rows(expected)
                }
                for rows in _rows(expected):
                    parts = [part for part in held_parts if part._replace(start=0, num=0) == rows._replace(num=0)]
                    held = [row for part in parts for row in range(*part.part.indices(rows.total))]
                    assert sorted(set(held)) == list(range(rows.total))
                    # a row that several ranks hold is one that they share on purpose, alike
                    assert len(held) % rows.total == 0


def test_the_weights_that_a_rank_allocates_are_the_declared_ones(checkpoint: tuple[Path, ModelSpec]) -> None:
    _, spec = checkpoint
    share = WeightShare(spec, torch.bfloat16, 1, 2, device=torch.device("meta"))
    for mixer, weights in _with_inner(spec, empty_decoder_weights(share).layers):
        found = {field: each for field, each in vars(weights).items() if each is not None}
        linears, vectors = mixer.linears(spec, 1, 2), mixer.vectors(spec, 1, 2)
        shapes: dict[str, tuple[int, ...]] = {}
        for linear in linears:
            num_outputs = sum(part.num for part in linear.outputs)
            shapes[linear.field] = num_outputs, linear.inputs.num
            if linear.biased and not linear.reads_divided:
                shapes[linear.bias_field] = (num_outputs,)
        for vector in vectors:
            num_rows = sum(part.num for part in vector.parts)
            shapes[vector.field] = (num_rows, *vector.row)
        assert {field: each.shape for field, each in found.items()} == shapes
        assert {field for field, each in found.items() if each.dtype == torch.float32} == {
            vector.field for vector in vectors if vector.is_float32
        }
        multiplied = sum(math.prod(shapes[linear.field]) for linear in linears)
        assert weights.num_weights(spec) == multiplied


@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_states_that_a_rank_allocates_are_the_declared_ones(
    checkpoint: tuple[Path, ModelSpec], tp_size: int
) -> None:
    _, spec = checkpoint
    for mixer in spec.mixer_kinds:
        tensors = mixer.state(tp_size)
        assert mixer.keeps_state == bool(tensors) == bool(mixer.recurrence)
        states = empty_states(3, 5, tensors, torch.bfloat16, torch.device("cpu"))
        assert sum(each.nbytes for each in states) == 3 * 5 * state_bytes(tensors, torch.bfloat16)
        if tensors:
            fields: set[str] = {each.name for each in dataclasses.fields(import_path(mixer.recurrence).layer)}
            assert {each.field for each in tensors} <= fields
            parts = [mixer, *mixer.inner(spec).values()]
            names = {name for part in parts for name in import_path(part.weights_class).NAMES}
            # what computes lightning attention gets constants instead of weights, and Mamba-1 what is made of them
            is_made = isinstance(mixer, LightningSpec | Mamba1Spec)
            assert is_made or fields - {each.field for each in tensors} <= names


def test_a_layer_keeps_one_thing_or_nothing_and_two_mixers_keep_both(checkpoint: tuple[Path, ModelSpec]) -> None:
    _, spec = checkpoint
    for layer, mixer in enumerate(spec.mixers):
        # those of a layer, or of the one whose keys and values it reads
        has_blocks = spec.mixers[mixer.kept_by(layer)].cached(spec, mixer.kept_by(layer)).kind != "none"
        assert (mixer.kept_by(layer) == layer) == (mixer.cached(spec, layer).kind != "none") or not has_blocks
        assert has_blocks == (mixer.cached_numbers(spec, 1) > 0)
        assert has_blocks + mixer.keeps_state + mixer.is_null == 1 + isinstance(mixer, BesideSpec)


def test_adapters_may_change_the_linear_layers_that_peft_finds(checkpoint: tuple[Path, ModelSpec]) -> None:
    path, spec = checkpoint
    with torch.device("meta"):
        network: Any = auto_class(AutoConfig.from_pretrained(path)).from_config(AutoConfig.from_pretrained(path))
    modules = {name: each for name, each in network.named_modules() if isinstance(each, nn.Linear)}
    for layer, mixer in enumerate(spec.mixers):
        in_network = {name: known for known, name in mixer.renamed(spec).items()}
        assert all(len(linear.outputs) <= MAX_PARTS for linear in mixer.adapted_linears(spec).values())
        for name, shape in mixer.adapted_shapes(spec).items():
            end = f"layers.{layer}.{in_network.get(name, name)}"
            found = [each for known, each in modules.items() if known.endswith(end) and "vision" not in known]
            assert [(each.out_features, each.in_features) for each in found] == [shape], name


def _with_inner(spec: ModelSpec, layers: list[LayerWeights]) -> Iterator[tuple[LayerPart, LayerPartWeights]]:
    """The mixers of all layers, or the parts that these consist of, with their weights."""
    for mixer, layer in zip(spec.mixers, layers, strict=True):
        inner = mixer.inner(spec)
        yield from ((part, getattr(layer.mixer, field)) for field, part in inner.items())
        if not inner:
            yield mixer, layer.mixer


def _rows(declared: FusedLinear | PartTensor) -> tuple[Rows, ...]:
    return declared.parts if isinstance(declared, PartTensor) else (*declared.outputs, declared.inputs)
