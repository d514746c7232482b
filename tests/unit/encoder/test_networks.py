"""Encoders compute what transformers computes, whatever prompts share a step, on any number of ranks."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from encoder_checkpoints import FAMILIES, HEADS, make_encoder, reference
from safetensors.torch import load_file, save_file
from torch import Tensor

from raycore.checkpoint.model_spec import load_model_spec
from raycore.checkpoint.stored_model import fit_model
from raycore.encoder.attention import EncoderHeads, make_attention
from raycore.encoder.encoder import Encoder
from raycore.encoder.weights import load_encoder_weights, random_encoder_weights
from raycore.errors import InvalidCheckpoint
from raycore.kernels import library
from raycore.layers.native_operations import NativeOperations
from raycore.layers.operations import Operations, check_tiles
from raycore.messages import NewRequest, StepPlan
from raycore.models.spec import ModelSpec
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.pooling.models.forms import PoolingChoice
from raycore.sampling_params import SamplingParams
from raycore.step.batch import SlotBatch
from raycore.step.device_batch import DeviceBatch
from raycore.weights.share import WeightShare

CPU = torch.device("cpu")
LENGTHS = (5, 40, 37, 1, 90, 40)
ARCHITECTURES = [family + head for family in FAMILIES for head in HEADS]
KERNELS = ["torch", pytest.param("native", marks=pytest.mark.skipif(library.load() is None, reason="no kernels"))]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    paths: dict[str, Path] = {}

    def find(architecture: str) -> Path:
        if architecture not in paths:
            paths[architecture] = make_encoder(tmp_path_factory.mktemp(architecture), architecture)
        return paths[architecture]

    return find


def spec_of(path: Path) -> ModelSpec:
    return fit_model(load_model_spec(path, pooling=PoolingChoice()), path)


def prompts_of(spec: ModelSpec, lengths=LENGTHS) -> list[list[int]]:
    rnd = random.Random(0)
    return [[rnd.randrange(3, spec.vocab_size) for _ in range(length)] for length in lengths]


class Network:
    """One rank's part of an encoder, with its attention."""

    def __init__(self, path: Path, kernels: str = "torch", dtype=torch.float32, *, invariant=False, ranks=None) -> None:
        ranks, native = ranks or TensorParallel(), kernels == "native"
        self.spec = spec_of(path)
        weights = load_encoder_weights(WeightShare(self.spec, dtype, ranks.rank, ranks.size), path)
        operations = (
            NativeOperations(batch_invariant=invariant) if native else Operations(CPU, batch_invariant=invariant)
        )
        self.operations = operations
        self.encoder = Encoder(self.spec, weights, ranks, operations)
        heads = EncoderHeads.of(self.spec, ranks.size, self.spec.max_length, dtype, CPU)
        self.attention = make_attention(heads, is_native=native, batch_invariant=invariant)

    def hidden(self, prompts: list[list[int]]) -> list[Tensor]:
        """The final hidden states of each prompt."""
        batch = DeviceBatch(SlotBatch(len(prompts), self.spec.max_length, 16), CPU)
        counts = [len(prompt) for prompt in prompts]
        new = [_new(slot, prompt) for slot, prompt in enumerate(prompts)]
        slots = np.arange(len(prompts), dtype=np.int32).tobytes()
        plan = StepPlan(0, slots, np.array(counts, np.int32).tobytes(), new_requests=new)
        batch.apply(plan)
        step, tensors = batch.advance(plan)
        attention, _ = self.encoder.around(self.attention)
        with torch.inference_mode():
            attention.begin(step, tensors)
            return list(self.encoder.forward(batch.token_ids_of(tensors), attention).split(counts))


def _new(slot: int, prompt: list[int]) -> NewRequest:
    token_ids = np.array(prompt, np.int32).tobytes()
    return NewRequest(slot, token_ids, len(prompt), 0, np.zeros(8, np.int32).tobytes(), SamplingParams(), 0)


def expected_hidden(path: Path, prompts: list[list[int]]) -> list[Tensor]:
    network = reference(path)
    body = network.base_model
    with torch.inference_mode():
        return [body(torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_hidden_states_are_those_of_transformers(checkpoints, architecture, kernels):
    network = Network(checkpoints(architecture), kernels)
    prompts = prompts_of(network.spec)
    expected = expected_hidden(checkpoints(architecture), prompts)
    for own, theirs in zip(network.hidden(prompts), expected, strict=True):
        torch.testing.assert_close(own, theirs, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_points_where_float32_does(checkpoints, family, kernels):
    path = checkpoints(f"{family}Model")
    network = Network(path, kernels, torch.bfloat16)
    prompts = prompts_of(network.spec)
    for own, theirs in zip(network.hidden(prompts), expected_hidden(path, prompts), strict=True):
        assert torch.cosine_similarity(own.float(), theirs).min() > 0.999


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_batch_invariant_bits_depend_on_nothing_else(checkpoints, family, kernels):
    network = Network(checkpoints(f"{family}Model"), kernels, invariant=True)
    check_tiles(network.operations, TensorParallel())
    prompts = prompts_of(network.spec)
    together = network.hidden(prompts)
    backwards = network.hidden(prompts[::-1])[::-1]
    for index, prompt in enumerate(prompts):
        (alone,) = network.hidden([prompt])
        assert torch.equal(alone, together[index])
        assert torch.equal(alone, backwards[index])


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_are_the_same_on_any_number_of_ranks(checkpoints, family):
    spec = spec_of(checkpoints(f"{family}Model"))
    whole = random_encoder_weights(WeightShare(spec, torch.float32), seed=3)
    halves = [random_encoder_weights(WeightShare(spec, torch.float32, rank, 2), seed=3) for rank in (0, 1)]
    assert torch.equal(whole.embed_VD, torch.cat([half.embed_VD for half in halves])[: len(whole.embed_VD)])
    for index, layer in enumerate(whole.layers):
        parts = [half.layers[index] for half in halves]
        down_DF = torch.cat([part.feed_forward.down_DF for part in parts], 1)
        assert torch.equal(layer.feed_forward.down_DF, down_DF)
        assert (layer.feed_forward_norm.weight_D == 1).all()


def test_early_checkpoints_call_the_weights_of_norms_gamma_and_beta(checkpoints, tmp_path):
    path = checkpoints("BertForMaskedLM")
    tensors = load_file(path / "model.safetensors")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    save_file(old | {"bert.embeddings.position_ids": torch.arange(128)[None]}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    prompts = prompts_of(spec_of(path))
    for own, theirs in zip(Network(tmp_path).hidden(prompts), expected_hidden(path, prompts), strict=True):
        torch.testing.assert_close(own, theirs, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("architecture", "changes", "named"),
    [
        ("BertModel", {"hidden_act": "relu"}, "hidden_act"),
        ("BertModel", {"is_decoder": True}, "is_decoder"),
        ("ModernBertModel", {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
        ("ModernBertForSequenceClassification", {"classifier_pooling": "max"}, "classifier_pooling"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(checkpoints, tmp_path, architecture, changes, named):
    config = json.loads((checkpoints(architecture) / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidCheckpoint, match=named):
        load_model_spec(tmp_path, pooling=PoolingChoice())


def test_an_encoder_that_should_generate_is_refused(checkpoints):
    with pytest.raises(InvalidCheckpoint, match=r"BertForMaskedLM.*encoders pool"):
        load_model_spec(checkpoints("BertForMaskedLM"))


def test_prompts_are_as_long_as_there_are_positions(checkpoints):
    assert spec_of(checkpoints("BertModel")).max_length == 128
    assert spec_of(checkpoints("RobertaModel")).max_length == 128  # of 131, the first three are for padding
    assert spec_of(checkpoints("ModernBertModel")).max_length == 128
