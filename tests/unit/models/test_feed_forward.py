"""What each feed-forward part declares holds for the checkpoints of its families: tensors, weights and adapters."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from families import make_checkpoint

from raycore.checkpoint.model_spec import load_model_spec
from raycore.checkpoint.stored_model import fit_model
from raycore.checkpoint.weight_files import stored_tensors
from raycore.class_paths import import_path
from raycore.layers.feed_forward import FeedForward
from raycore.models.closing import ClosingSpec
from raycore.models.feed_forward import DenseSpec, FeedForwardSpec, NoFeedForward, ScaledDenseSpec, XieluSpec
from raycore.models.spec import ModelSpec
from raycore.parts.experts.models import ClosingMoeSpec, MoeSpec
from raycore.weights.layer_part_weights import LayerPartWeights
from raycore.weights.loader import empty_decoder_weights
from raycore.weights.share import WeightShare

KINDS: list[type[FeedForwardSpec]] = [
    DenseSpec,
    ScaledDenseSpec,
    XieluSpec,
    MoeSpec,
    NoFeedForward,
    ClosingSpec,
    ClosingMoeSpec,
]
FAMILIES = [
    *("qwen2", "phi3", "mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss", "lfm2_moe", "kimi_linear"),
    *("granitemoehybrid_experts", "nemotron_h", "starcoder2", "cohere2", "apertus", "falcon_h1"),
    *("gemma4", "gemma4_experts"),
]
"""With each kind of feed-forward part, and with each form of its tensors."""


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelSpec]:
    path = make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    return path, fit_model(load_model_spec(path), path)


@pytest.mark.parametrize("kind", KINDS)
def test_what_computes_a_part_can_be_imported(kind: type[FeedForwardSpec]) -> None:
    assert issubclass(import_path(kind.computed_by), FeedForward)
    weights = import_path(kind.weights_class)
    assert issubclass(weights, LayerPartWeights)
    assert {field.name for field in dataclasses.fields(weights)} - {"first_expert"} == set(weights.NAMES)
    assert set(weights.MULTIPLIED) <= set(weights.NAMES)
    assert len(set(weights.NAMES.values())) == len(weights.NAMES)


def test_the_tensors_that_a_part_declares_are_those_of_the_checkpoint(checkpoint: tuple[Path, ModelSpec]) -> None:
    path, spec = checkpoint
    stored = {name: tensor.shape for name, tensor in stored_tensors(path).items()}
    for layer, (mixer, part) in enumerate(zip(spec.mixers, spec.feed_forwards, strict=True)):
        prefix = spec.names.layer(layer)
        own = {name.removeprefix(prefix): shape for name, shape in stored.items() if name.startswith(prefix)}
        others = {*mixer.tensors(spec), *(each for name in spec.norms(layer).given for each in spec.norm_tensors(name))}
        declared = part.stored(spec, stored.__contains__).tensors(spec)
        assert declared == {name: shape for name, shape in own.items() if name not in others}


@pytest.mark.parametrize("tp_size", [1, 2])
def test_what_ranks_allocate_is_of_the_declared_classes_and_counted(
    checkpoint: tuple[Path, ModelSpec], tp_size: int
) -> None:
    _, spec = checkpoint
    shares = [WeightShare(spec, torch.bfloat16, rank, tp_size, device=torch.device("meta")) for rank in range(tp_size)]
    ranks = [empty_decoder_weights(share).layers for share in shares]
    for part, *layers in zip(spec.feed_forwards, *ranks, strict=True):
        counts: list[int] = []
        for tp_rank, layer in enumerate(layers):
            own = layer.feed_forward
            assert isinstance(own, import_path(part.weights_class))
            declared = (*part.linears(spec, tp_rank, tp_size), *part.vectors(spec, tp_rank, tp_size))
            assert {each.field for each in declared} <= {field for field, each in vars(own).items() if each is not None}
            counts.append(own.num_weights(spec))
        # each rank has all of a router, and the gate of shared experts isn't counted there
        whole = part.num_weights(spec)
        assert whole - spec.hidden_size <= sum(counts) <= whole + (tp_size - 1) * 32 * spec.hidden_size


def test_some_experts_are_used_by_a_token_and_all_dense_weights(checkpoint: tuple[Path, ModelSpec]) -> None:
    _, spec = checkpoint
    assert spec.has_experts == any(part.has_experts for part in spec.feed_forwards)
    for part in spec.feed_forward_kinds:
        every, used = part.expert_weights(spec)
        assert part.has_experts == (0 < used < every)
        assert used < part.num_weights(spec) or part.is_null


def test_adapters_change_linear_layers_of_parts_without_experts(checkpoint: tuple[Path, ModelSpec]) -> None:
    _, spec = checkpoint
    for part in spec.feed_forward_kinds:
        # a layer's own inputs are outside of experts
        own = {name for name in part.adapted_linears(spec) if not name.startswith("layer_input")}
        assert bool(own) != (part.has_experts or part.is_null)
        assert part.described


def test_the_other_form_of_a_checkpoint_has_other_tensors_that_make_the_same(
    checkpoint: tuple[Path, ModelSpec],
) -> None:
    path, spec = checkpoint
    stored = stored_tensors(path)
    for part in spec.feed_forward_kinds:
        forms = part.other_forms(spec, stored.__contains__)
        assert bool(forms) == part.has_experts
        for has_tensor in forms:
            found, other = part.stored(spec, stored.__contains__), part.stored(spec, has_tensor)
            assert found.num_weights(spec) == other.num_weights(spec)
            assert found.tensors(spec).keys() != other.tensors(spec).keys()
            (back,) = part.other_forms(spec, has_tensor)
            assert part.stored(spec, back) == found


@pytest.mark.parametrize("is_native", [False, True])
def test_a_part_needs_more_memory_for_more_tokens_in_the_mixer(
    checkpoint: tuple[Path, ModelSpec], is_native: bool
) -> None:
    _, spec = checkpoint
    for part in spec.feed_forward_kinds:
        few, many = (part.token_bytes(spec, mixed, 1, 2, 1, is_native=is_native) for mixed in (0, 1 << 20))
        assert few < many
        assert bool(few) != part.is_null
