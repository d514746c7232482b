"""Quantized checkpoints that the tools have written become the numbers that the tools make of them, on every rank.

The checkpoints are written by tests/support/write_quantized.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from dequantized import WRITTEN, check_logprobs, plain_copy
from safetensors.torch import load_file, save_file
from small_model import make_runner
from torch import Tensor

from raycore.checkpoint.model_spec import load_model_spec
from raycore.checkpoint.stages import split_layers
from raycore.checkpoint.stored_model import fit_model
from raycore.errors import InvalidCheckpoint
from raycore.models.spec import ModelSpec
from raycore.weights.checkpoint_reader import CheckpointReader
from raycore.weights.fp8_weight import Fp8Weight
from raycore.weights.linear_formats import EVERY_FP8, STORED_FP8
from raycore.weights.loader import DecoderWeights, load_decoder_weights
from raycore.weights.packed_weight import pack, unpack
from raycore.weights.share import WeightShare
from raycore.weights.staging import Staging

CHECKPOINTS = sorted(path.name for path in WRITTEN.iterdir())
INTEGERS = [name for name in CHECKPOINTS if "fp8" not in name]

Tensors = dict[str, Tensor]


def plain_spec(spec: ModelSpec) -> ModelSpec:
    return msgspec.structs.replace(spec, quantization=None)


def tool_dtype(written: Path) -> torch.dtype:
    """The dtype in which the tool dequantizes."""
    return next(iter(load_file(written / "dequantized.safetensors").values())).dtype


def tensors_of(part: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(part, Tensor):
        yield name, part
    elif isinstance(part, list):
        for index, each in enumerate(part):
            yield from tensors_of(each, f"{name}[{index}]")
    elif is_dataclass(part):
        for field in fields(part):
            yield from tensors_of(getattr(part, field.name), f"{name}.{field.name}")


def check_equal(found: DecoderWeights, expected: DecoderWeights) -> None:
    expected_tensors = dict(tensors_of(expected))
    assert dict(tensors_of(found)).keys() == expected_tensors.keys()
    for name, tensor in tensors_of(found):
        assert tensor.dtype == expected_tensors[name].dtype, name
        assert torch.equal(tensor, expected_tensors[name]), name


@pytest.mark.parametrize("tp_size", [1, 2, 8])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_each_rank_loads_its_part_of_the_numbers_that_the_tool_dequantizes(
    tmp_path: Path, checkpoint: str, tp_size: int
) -> None:
    """With 8 ranks, a rank's inputs and outputs begin in the middle of a word, and in the middle of a group."""
    written = WRITTEN / checkpoint
    spec, plain, dtype = load_model_spec(written), plain_copy(tmp_path, written), tool_dtype(written)
    assert spec.quantization is not None
    for tp_rank in range(tp_size):
        expected = load_decoder_weights(WeightShare(plain_spec(spec), dtype, tp_rank, tp_size), plain)
        check_equal(load_decoder_weights(WeightShare(spec, dtype, tp_rank, tp_size), written), expected)


@pytest.mark.parametrize("checkpoint", ["compressed-tensors-packed-4-asymmetric", "gptq-4-ordered-v2", "autoawq-4"])
def test_dequantized_numbers_are_rounded_only_once(tmp_path: Path, checkpoint: str) -> None:
    written = WRITTEN / checkpoint
    spec, plain = load_model_spec(written), plain_copy(tmp_path, written)
    exact = dict(tensors_of(load_decoder_weights(WeightShare(spec, torch.float32, 1, 2), written)))
    for dtype in (torch.bfloat16, torch.float16):
        for name, tensor in tensors_of(load_decoder_weights(WeightShare(spec, dtype, 1, 2), written)):
            assert torch.equal(tensor, exact[name].to(dtype)), name
    for name, tensor in tensors_of(load_decoder_weights(WeightShare(plain_spec(spec), torch.float32, 1, 2), plain)):
        torch.testing.assert_close(exact[name], tensor, rtol=2**-8, atol=0)


@pytest.mark.parametrize("checkpoint", ["compressed-tensors-mixed", "gptq-8-ordered"])
def test_dequantized_numbers_are_sent_to_devices_in_pieces(checkpoint: str) -> None:
    written = WRITTEN / checkpoint
    spec, staging = load_model_spec(written), Staging(torch.device("cpu"), buffer_bytes=100)
    found = load_decoder_weights(WeightShare(spec, torch.bfloat16, 1, 2), written, staging=staging)
    check_equal(found, load_decoder_weights(WeightShare(spec, torch.bfloat16, 1, 2), written))


def test_large_weights_are_dequantized_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    written = WRITTEN / "gptq-4-ordered-v2"
    spec = load_model_spec(written)
    whole = load_decoder_weights(WeightShare(spec, torch.float16), written)
    monkeypatch.setattr("raycore.weights.packed_weight.NUMBERS_AT_A_TIME", 100)
    check_equal(load_decoder_weights(WeightShare(spec, torch.float16), written), whole)


def test_quantized_integers_are_rounded_to_fp8_on_request() -> None:
    written = WRITTEN / "gptq-4"
    spec = load_model_spec(written)
    plain = load_decoder_weights(WeightShare(spec, torch.float32), written).layers[0]
    found = load_decoder_weights(WeightShare(spec, torch.float32, formats=EVERY_FP8), written).layers[0]
    assert isinstance(found.mixer.qkv_OD, Fp8Weight)
    assert isinstance(plain.mixer.qkv_OD, Tensor)
    numbers = found.mixer.qkv_OD.values_OI.float() * found.mixer.qkv_OD.scales_O.unsqueeze(1)
    assert (numbers - plain.mixer.qkv_OD).norm() < 0.05 * plain.mixer.qkv_OD.norm()


@pytest.mark.parametrize("checkpoint", ["compressed-tensors-fp8", "compressed-tensors-fp8-tensor"])
def test_quantized_fp8_weights_can_stay_in_fp8(tmp_path: Path, checkpoint: str) -> None:
    written = WRITTEN / checkpoint
    spec, plain = load_model_spec(written), plain_copy(tmp_path, written)
    found = load_decoder_weights(WeightShare(spec, torch.bfloat16, 1, 2, formats=STORED_FP8), written).layers[0]
    expected = load_decoder_weights(WeightShare(plain_spec(spec), torch.bfloat16, 1, 2), plain).layers[0]
    for weight, numbers in ((found.mixer.qkv_OD, expected.mixer.qkv_OD), (found.mixer.o_DO, expected.mixer.o_DO)):
        assert isinstance(weight, Fp8Weight)
        assert torch.equal((weight.values_OI.float() * weight.scales_O.unsqueeze(1)).bfloat16(), numbers)


@pytest.mark.parametrize("checkpoint", ["compressed-tensors-fp8", "compressed-tensors-int8"])
def test_zero_points_of_symmetric_weights_are_left_out(tmp_path: Path, checkpoint: str) -> None:
    """Old versions of compressed-tensors wrote them, all zero."""
    shutil.copytree(WRITTEN / checkpoint, tmp_path, dirs_exist_ok=True)
    stored = load_file(tmp_path / "model.safetensors")
    scales = {name: each for name, each in stored.items() if name.endswith("weight_scale")}
    assert scales
    stored |= {name.replace("weight_scale", "weight_zero_point"): torch.zeros_like(scales[name]) for name in scales}
    save_file(stored, tmp_path / "model.safetensors")
    fit_model(load_model_spec(tmp_path), tmp_path)


def test_quantized_integers_are_not_rounded_to_fp8_without_a_request() -> None:
    written = WRITTEN / "compressed-tensors-int8"
    layer = load_decoder_weights(
        WeightShare(load_model_spec(written), torch.bfloat16, formats=STORED_FP8), written
    ).layers[0]
    assert isinstance(layer.mixer.qkv_OD, Tensor)


class NumRead(dict[str, int]):
    """Counts the elements that are read of each tensor."""

    @classmethod
    def watch(cls, monkeypatch: pytest.MonkeyPatch) -> NumRead:
        num_read, view = cls(), CheckpointReader.view

        def counting_view(self: CheckpointReader, name: str, *arguments: Any) -> Tensor:
            part = view(self, name, *arguments)
            num_read[name] = num_read.get(name, 0) + part.numel()
            return part

        monkeypatch.setattr(CheckpointReader, "view", counting_view)
        return num_read


@pytest.mark.parametrize("checkpoint", INTEGERS)
def test_each_rank_reads_only_its_own_quantized_words(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks' words are all words. With eight ranks, a word that two ranks share is read by both."""
    written = WRITTEN / checkpoint
    spec = load_model_spec(written)
    stored = load_file(written / "model.safetensors")
    words = {
        name: tensor.numel()
        for name, tensor in stored.items()
        if tensor.dtype in (torch.int32, torch.int8)
        and tensor.dim() == 2
        and not name.endswith(("zero_point", "qzeros"))
    }
    num_read = NumRead.watch(monkeypatch)
    for tp_size, most in ((2, 1), (8, 2)):
        num_read.clear()
        for tp_rank in range(tp_size):
            load_decoder_weights(WeightShare(spec, torch.bfloat16, tp_rank, tp_size), written)
        for name, num_words in words.items():
            # key-value heads that ranks share are read by each of them
            shared = max(1, tp_size // spec.num_kv_heads) if ".k_proj" in name or ".v_proj" in name else 1
            assert num_words <= num_read[name] <= most * num_words * shared, name


@pytest.mark.parametrize("checkpoint", ["compressed-tensors-packed-4-asymmetric", "autoawq-4"])
def test_ranks_read_scales_and_zero_points_of_their_own_groups(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = WRITTEN / checkpoint
    num_read = NumRead.watch(monkeypatch)
    for tp_rank in range(2):
        load_decoder_weights(WeightShare(load_model_spec(written), torch.bfloat16, tp_rank, 2), written)
    for name, tensor in load_file(written / "model.safetensors").items():
        if name.endswith(("weight_scale", "scales", "zero_point", "qzeros")):
            assert num_read[name] == tensor.numel(), name


def test_a_stage_reads_only_its_own_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    written = WRITTEN / "compressed-tensors-packed-4"
    spec = msgspec.structs.replace(load_model_spec(written), num_layers=2, layer_windows=[None, None])
    num_read = NumRead.watch(monkeypatch)
    first, _ = split_layers(spec, 2, [1, 1])
    load_decoder_weights(WeightShare(spec, torch.bfloat16, stage=first), written)
    assert "model.layers.0.mlp.down_proj.weight_packed" in num_read
    assert "lm_head.weight" not in num_read


@pytest.mark.parametrize("share", [range(1), range(1, 2)])
def test_whole_quantized_experts_are_read(tmp_path: Path, share: range) -> None:
    written = WRITTEN / "compressed-tensors-experts"
    spec, plain = load_model_spec(written), plain_copy(tmp_path, written)
    assert spec.moe is not None
    experts = spec.moe.whole_experts(share.start, 2)
    found = load_decoder_weights(WeightShare(spec, torch.bfloat16, experts=experts), written)
    check_equal(found, load_decoder_weights(WeightShare(plain_spec(spec), torch.bfloat16, experts=experts), plain))


@pytest.mark.parametrize("checkpoint", ["compressed-tensors-mixed", "gptq-4-ordered-v2", "gptqmodel-awq"])
def test_the_logits_of_dequantized_weights_equal_those_of_transformers(tmp_path: Path, checkpoint: str) -> None:
    written = WRITTEN / checkpoint
    spec = load_model_spec(written)
    weights = as_float32(load_decoder_weights(WeightShare(spec, tool_dtype(written)), written))
    check_logprobs(make_runner(spec, weights), written, tmp_path, 1e-4)


def as_float32(part: Any) -> Any:
    if isinstance(part, Tensor):
        return part.float()
    if isinstance(part, list):
        return [as_float32(each) for each in part]
    if is_dataclass(part) and not isinstance(part, type):
        return replace(part, **{field.name: as_float32(getattr(part, field.name)) for field in fields(part)})
    return part


DOWN = "model.layers.0.mlp.down_proj"
PACKED, ORDERED = "compressed-tensors-packed-4-asymmetric", "compressed-tensors-packed-4-ordered"


@pytest.mark.parametrize(
    ("checkpoint", "tensor", "change", "fragments"),
    [
        (PACKED, "weight_packed", None, ["weight_packed is missing"]),
        (PACKED, "weight_packed", lambda words: words[:, :5], ["weight_packed", "(32, 5)", "(32, 12)"]),
        (PACKED, "weight_packed", lambda words: words.float(), ["weight_packed", "torch.float32", "int32"]),
        (PACKED, "weight_shape", lambda shape: shape + 1, ["weight_shape", "(33, 97)", "(32, 96)"]),
        (PACKED, "weight_scale", lambda scales: scales[:, :2], ["weight_scale", "(32, 2)", "(32, 6)"]),
        (PACKED, "weight_scale", lambda scales: scales.double(), ["weight_scale", "torch.float64"]),
        (PACKED, "weight_zero_point", None, ["weight_zero_point is missing"]),
        (PACKED, "weight_zero_point", lambda words: words[:1], ["weight_zero_point", "(1, 6)", "(4, 6)"]),
        (ORDERED, "weight_g_idx", None, ["weight_g_idx is missing"]),
        (ORDERED, "weight_g_idx", lambda groups: groups + 1, ["weight_g_idx", "6 of the layer", "group_size=16"]),
        ("compressed-tensors-int8", "weight", lambda values: values[:, 1:], ["weight", "(32, 95)", "(32, 96)"]),
        ("compressed-tensors-int8", "weight_scale", None, ["stored as torch.int8", "expected float32"]),
        ("gptq-4", "qweight", lambda words: words[1:], ["qweight", "(11, 32)", "(12, 32)"]),
        ("gptq-4", "qzeros", None, ["qzeros is missing"]),
        ("gptq-4", "scales", lambda scales: scales[:2], ["scales", "(2, 32)", "(3, 32)"]),
        ("gptq-8-ordered", "g_idx", None, ["g_idx is missing"]),
        ("gptq-8-ordered", "g_idx", lambda groups: -groups - 2, ["g_idx", "6 of the layer"]),
        ("autoawq-4", "qweight", lambda words: words.t(), ["qweight", "(4, 96)", "(96, 4)"]),
    ],
)
def test_damaged_quantized_tensors_are_named(
    tmp_path: Path, checkpoint: str, tensor: str, change: Callable[[Tensor], Tensor] | None, fragments: list[str]
) -> None:
    written = WRITTEN / checkpoint
    stored = load_file(written / "model.safetensors")
    found = stored.pop(f"{DOWN}.{tensor}")
    if change is not None:
        stored[f"{DOWN}.{tensor}"] = change(found).contiguous()
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(InvalidCheckpoint) as raised:
        load_decoder_weights(WeightShare(load_model_spec(written), torch.bfloat16), tmp_path)
    for fragment in (DOWN, str(tmp_path), *fragments):
        assert fragment in str(raised.value)


def test_a_truncated_quantized_file_is_named(tmp_path: Path) -> None:
    path = shutil.copytree(WRITTEN / "gptq-4", tmp_path / "copy")
    content = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(content[:-100])
    with pytest.raises(InvalidCheckpoint, match=r"model\.safetensors can't be read.*download it again"):
        load_decoder_weights(WeightShare(load_model_spec(path), torch.bfloat16), path)


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_integers_are_unpacked(bits: int) -> None:
    integers = torch.randint(0, 1 << bits, (3, 21), dtype=torch.uint8)
    words = pack(integers, bits)
    assert words.shape == (3, 3 if bits == 4 else 6)
    assert torch.equal(unpack(words, bits)[:, :21], integers)
