"""Checkpoints with weights in integers: layers that keep the integers have the tools' numbers, and compute with them.

The checkpoints are written by tests/support/write_quantized.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from dequantized import WRITTEN, check_logprobs
from native_kernels import needs_kernels
from peft_adapters import save_adapter
from small_model import make_runner
from torch import Tensor

from raycore.attention.spec import Attention
from raycore.checkpoint.model_spec import load_model_spec
from raycore.decoder.decoder import Decoder
from raycore.decoder.mixer import reorder_adapter_
from raycore.errors import InvalidCheckpoint
from raycore.layers.native_operations import NativeOperations
from raycore.layers.operations import Operations
from raycore.models.quantization import WeightScheme
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.adapters.checkpoint.spec import LoraSpec
from raycore.parts.adapters.layers import Adapters
from raycore.parts.adapters.weights import load_lora_weights
from raycore.weights.integer_weight import IntegerWeight, kept_group_size
from raycore.weights.layer_part_weights import MlpWeights
from raycore.weights.linear_formats import CONVERTED, EVERY_INTEGERS, GROUPED_FP8, STORED_INTEGERS
from raycore.weights.loader import DecoderWeights, load_decoder_weights, random_decoder_weights
from raycore.weights.packed_weight import PackedWeight, pack
from raycore.weights.share import WeightShare
from raycore.weights.weight import Weight

KEPT = {
    "auto-gptq-4-asymmetric": 4,
    "autoawq-4": 4,
    "compressed-tensors-int8": 8,
    "compressed-tensors-mxfp4": 4,
    "compressed-tensors-nvfp4": 4,
    "compressed-tensors-packed-4": 4,
    "compressed-tensors-packed-4-asymmetric": 4,
    "compressed-tensors-packed-4-rows": 4,
    "compressed-tensors-packed-8": 8,
    "gptq-4": 4,
    "gptqmodel-awq": 4,
    "modelopt-nvfp4": 4,
    "torchao-int4": 4,
    "torchao-int8": 8,
    "torchao-int8-dynamic": 8,
    "torchao-intx": 8,
}
"""The checkpoints whose layers can all be kept, and their bits."""
SHORT = ("compressed-tensors-int8", "torchao-int8-dynamic")
"""Those that were made for inputs that are rounded to 8 bits."""
FLOATS = [
    *("compressed-tensors-fp8", "compressed-tensors-fp8-blocks", "compressed-tensors-fp8-static"),
    *("compressed-tensors-fp8-tensor", "torchao-fp8", "torchao-fp8-dynamic"),
]
"""Those in fp8."""
CPU = torch.device("cpu")


def linear_weights(weights: DecoderWeights) -> Iterator[Weight]:
    for layer in weights.layers:
        yield layer.mixer.qkv_OD
        yield layer.mixer.o_DO
        assert isinstance(layer.feed_forward, MlpWeights)
        yield layer.feed_forward.gate_up_FD
        yield layer.feed_forward.down_DF


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("checkpoint", KEPT)
def test_every_rank_keeps_its_part_of_the_integers(checkpoint: str, tp_size: int) -> None:
    written = WRITTEN / checkpoint
    spec = load_model_spec(written)
    for tp_rank in range(tp_size):
        share = WeightShare(spec, torch.float32, tp_rank, tp_size)
        expected = list(linear_weights(load_decoder_weights(share, written)))
        found = list(linear_weights(load_decoder_weights(replace(share, formats=STORED_INTEGERS), written)))
        for weight, numbers in zip(found, expected, strict=True):
            assert isinstance(weight, IntegerWeight)
            assert isinstance(numbers, Tensor)
            assert weight.bits == KEPT[checkpoint]
            assert weight.row_bits == (8 if checkpoint in SHORT else 16)
            assert torch.equal(weight.dequantize(torch.float32), numbers)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("checkpoint", FLOATS)
def test_every_rank_keeps_its_part_of_numbers_in_fp8(checkpoint: str, tp_size: int) -> None:
    written = WRITTEN / checkpoint
    spec = load_model_spec(written)
    for tp_rank in range(tp_size):
        share = WeightShare(spec, torch.float32, tp_rank, tp_size)
        expected = list(linear_weights(load_decoder_weights(share, written)))
        found = list(linear_weights(load_decoder_weights(replace(share, formats=GROUPED_FP8), written)))
        for weight, numbers in zip(found, expected, strict=True):
            if checkpoint.endswith("blocks") and tp_rank == 1 and weight.shape[1] == 16:
                assert isinstance(weight, Tensor), "groups of 8 inputs are too small"
                continue
            assert isinstance(weight, IntegerWeight)
            assert (weight.bits, weight.code, weight.row_group_size) == (8, "e4m3", None)
            assert torch.equal(weight.dequantize(torch.float32), numbers)


@pytest.mark.parametrize("checkpoint", KEPT)
def test_inputs_are_rounded_to_8_bits_on_request_in_groups_of_at_most_32(checkpoint: str) -> None:
    """Those that have 8 bits already keep one scale for a row."""
    written = WRITTEN / checkpoint
    share = WeightShare(load_model_spec(written), torch.float32)
    plain = linear_weights(load_decoder_weights(replace(share, formats=STORED_INTEGERS), written))
    short = linear_weights(
        load_decoder_weights(replace(share, formats=replace(STORED_INTEGERS, short_rows=True)), written)
    )
    for before, weight in zip(plain, short, strict=True):
        assert isinstance(before, IntegerWeight)
        assert isinstance(weight, IntegerWeight)
        assert weight.row_bits == 8
        has_groups = before.row_bits == 16 and weight.shape[1] > 32
        assert weight.row_group_size == (min(32, weight.group_size) if has_groups else None)
        assert torch.equal(weight.dequantize(torch.float32), before.dequantize(torch.float32))


@pytest.mark.parametrize("checkpoint", ["gptq-8-ordered", "compressed-tensors-packed-4-ordered"])
def test_integers_whose_groups_are_not_neighboring_inputs_are_converted(checkpoint: str) -> None:
    spec = load_model_spec(WRITTEN / checkpoint)
    weights = load_decoder_weights(WeightShare(spec, torch.float32, formats=STORED_INTEGERS), WRITTEN / checkpoint)
    assert all(isinstance(weight, Tensor) for weight in linear_weights(weights))


def test_fused_layers_whose_parts_are_stored_differently_are_converted() -> None:
    spec = load_model_spec(WRITTEN / "gptq-mixed")
    weights = load_decoder_weights(WeightShare(spec, torch.float32, formats=STORED_INTEGERS), WRITTEN / "gptq-mixed")
    own = weights.layers[0].feed_forward
    assert isinstance(own, MlpWeights)
    assert isinstance(weights.layers[0].mixer.qkv_OD, IntegerWeight)
    assert isinstance(own.gate_up_FD, Tensor)
    assert isinstance(own.down_DF, Tensor)


def test_layers_not_stored_as_integers_can_be_rounded_to_8_bits() -> None:
    written = WRITTEN / "gptq-mixed"
    share = WeightShare(load_model_spec(written), torch.float32)
    plain = list(linear_weights(load_decoder_weights(share, written)))
    found = list(linear_weights(load_decoder_weights(replace(share, formats=EVERY_INTEGERS), written)))
    assert [weight.bits for weight in found if isinstance(weight, IntegerWeight)] == [4, 4, 8, 8]
    for weight, numbers in zip(found, plain, strict=True):
        assert isinstance(weight, IntegerWeight)
        assert isinstance(numbers, Tensor)
        error = (weight.dequantize(torch.float32) - numbers).abs()
        assert (error <= numbers.abs().amax(dim=1, keepdim=True) / 253).all()


@pytest.mark.parametrize("checkpoint", ["gptq-8-ordered", "compressed-tensors-packed-4-ordered"])
def test_stored_integers_that_cannot_be_kept_can_be_rounded_to_8_bits(checkpoint: str) -> None:
    """Also those that are stored in 8 bits, but with other groups."""
    written = WRITTEN / checkpoint
    share = WeightShare(load_model_spec(written), torch.float32)
    plain = list(linear_weights(load_decoder_weights(share, written)))
    found = list(linear_weights(load_decoder_weights(replace(share, formats=EVERY_INTEGERS), written)))
    for weight, numbers in zip(found, plain, strict=True):
        assert isinstance(weight, IntegerWeight)
        assert isinstance(numbers, Tensor)
        error = (weight.dequantize(torch.float32) - numbers).abs()
        assert (error <= numbers.abs().amax(dim=1, keepdim=True) / 253).all()


def test_random_weights_have_the_scheme_of_config_json() -> None:
    spec = load_model_spec(WRITTEN / "compressed-tensors-packed-4")
    plain = list(linear_weights(random_decoder_weights(WeightShare(spec, torch.float32, 0, 2), seed=5)))
    found = list(
        linear_weights(random_decoder_weights(WeightShare(spec, torch.float32, 0, 2, formats=STORED_INTEGERS), seed=5))
    )
    for weight, numbers in zip(found, plain, strict=True):
        assert isinstance(weight, IntegerWeight)
        assert isinstance(numbers, Tensor)
        assert (weight.dequantize(torch.float32) - numbers).abs().max() <= numbers.abs().max() / 13


@pytest.mark.parametrize("bits", [4, 8])
def test_numbers_can_be_rounded_to_integers_with_offsets(bits) -> None:
    """Random weights of a GGUF file's layers are."""
    numbers = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    found, expected = (IntegerWeight.empty(5, 64, bits, 32, 16, CPU, code) for code in ("affine", "integer"))
    found.quantize_(numbers)
    expected.quantize_(numbers)
    assert found.zeros_OG.dtype == torch.float32
    torch.testing.assert_close(found.dequantize(torch.float32), expected.dequantize(torch.float32), rtol=0, atol=1e-6)


def test_groups_that_differ_from_config_json_are_refused() -> None:
    groups_I = torch.arange(64) // 16
    groups_I[3] = 2
    ones = torch.ones(4, 4)
    packed = PackedWeight(pack(torch.ones(4, 64, dtype=torch.uint8), 4), 4, 0, 64, ones, ones.byte(), groups_I)
    with pytest.raises(InvalidCheckpoint, match="16 neighboring inputs share a scale"):
        IntegerWeight.empty(4, 64, 4, 16, 16, CPU).fill_(packed)


@pytest.mark.parametrize(
    ("group_size", "num_inputs", "first_input", "expected"),
    [
        (128, 1024, 0, 128),
        (128, 192, 192, 64),
        (128, 96, 96, 32),
        (None, 104, 104, 104),
        (512, 1024, 1024, 512),
        (96, 192, 192, 32),
        (128, 24, 24, None),
        (8, 64, 0, None),
        (128, 1020, 0, None),
    ],
)
def test_groups_that_ranks_divide_are_made_smaller(group_size, num_inputs, first_input, expected) -> None:
    assert kept_group_size(WeightScheme("packed", 4, group_size), num_inputs, first_input) == expected


class NoAttention(Attention):
    """Returns the values of the tokens themselves."""

    def __init__(self, width: int) -> None:
        self._width = width

    def __call__(self, layer: int, qkv_TO: Tensor) -> Tensor:
        return qkv_TO[:, : self._width].contiguous()


@needs_kernels
@pytest.mark.parametrize("checkpoint", KEPT)
def test_a_model_computes_with_the_integers(checkpoint: str) -> None:
    written = WRITTEN / checkpoint
    spec = load_model_spec(written)
    tokens = torch.arange(40) % spec.vocab_size
    outputs: list[Tensor] = []
    short = replace(STORED_INTEGERS, short_rows=True)
    for operations, formats in (
        (Operations(CPU), CONVERTED),
        (NativeOperations(), STORED_INTEGERS),
        (NativeOperations(), short),
    ):
        weights = load_decoder_weights(WeightShare(spec, torch.float32, formats=formats), written)
        decoder = Decoder(spec, weights, TensorParallel(), operations)
        attention = NoAttention(spec.num_heads * spec.head_dim)
        outputs.append(decoder.logits(decoder.forward(tokens, attention)))
    errors = [float((found - outputs[0]).norm() / outputs[0].norm()) for found in outputs[1:]]
    assert errors[0] < (0.02 if checkpoint in SHORT else 2e-4), "rows in 8 bits, or in 16"
    assert errors[1] < 0.02
    assert (errors[1] == errors[0]) == (checkpoint in SHORT), "whose rows have 8 bits already"


@needs_kernels
@pytest.mark.parametrize("checkpoint", KEPT)
def test_the_logits_of_integer_weights_are_near_those_of_transformers(tmp_path: Path, checkpoint: str) -> None:
    written = WRITTEN / checkpoint
    spec = load_model_spec(written)
    weights = load_decoder_weights(WeightShare(spec, torch.float32, formats=STORED_INTEGERS), written)
    if checkpoint in SHORT:
        tolerance = 0.1  # rows are rounded to 8 bits
    else:  # these tools round dequantized weights to bfloat16, the others to float16
        tolerance = 0.04 if checkpoint.startswith(("compressed-tensors", "modelopt")) else 0.005
    check_logprobs(make_runner(spec, weights, backend="native"), written, tmp_path, tolerance)


@needs_kernels
@pytest.mark.parametrize("checkpoint", ["compressed-tensors-int8", "gptq-4"])
def test_adapters_are_added_to_the_results_of_integer_weights(tmp_path: Path, checkpoint: str) -> None:
    written = WRITTEN / checkpoint
    spec = load_model_spec(written)
    save_adapter(tmp_path, spec)
    lora = LoraSpec.read(tmp_path, spec, 16)
    tokens = torch.arange(40) % spec.vocab_size
    outputs: list[Tensor] = []
    for is_native, has_adapter in ((False, True), (True, True), (True, False)):
        share = WeightShare(spec, torch.float32, formats=STORED_INTEGERS if is_native else CONVERTED)
        weights = load_decoder_weights(share, written)
        adapters = Adapters(CPU, 2, is_native=is_native)
        operations = NativeOperations() if is_native else Operations(CPU)
        decoder = Decoder(spec, weights, TensorParallel(), operations, adapters=adapters)
        if has_adapter:
            adapter = load_lora_weights(share, lora, tmp_path)
            reorder_adapter_(adapter, spec, 1)
            adapters.put(1, adapters.arrange(adapter))
        adapters.rows.begin_step(np.ones(len(tokens), np.int64), np.arange(len(tokens)))
        attention = NoAttention(spec.num_heads * spec.head_dim)
        outputs.append(decoder.logits(decoder.forward(tokens, attention)))
    expected, found, without = outputs
    error = (found - expected).norm() / expected.norm()
    assert error < (0.02 if checkpoint in SHORT else 2e-4), "rows in 8 bits, or in 16"
    assert (without - expected).norm() / expected.norm() > 0.1, "else the adapter changes little"
