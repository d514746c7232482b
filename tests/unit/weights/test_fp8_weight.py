"""Which rows and scales of fp8 weights each rank gets: of checkpoints in fp8, and of others that are rounded."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from small_model import SPEC as QWEN

from raycore.errors import InvalidCheckpoint
from raycore.models.quantization import Quantization, WeightScheme
from raycore.models.spec import ModelSpec
from raycore.parts.experts.models import MoeSpec
from raycore.parts.experts.weights import MoeWeights
from raycore.weights.fp8_weight import FP8, Fp8Weight, quantize_rows
from raycore.weights.layer_part_weights import MlpWeights
from raycore.weights.linear_formats import EVERY_FP8, STORED_FP8
from raycore.weights.loader import DecoderWeights, load_decoder_weights, random_decoder_weights
from raycore.weights.share import WeightShare
from raycore.weights.staging import Staging

CPU = torch.device("cpu")
FP8_LAYERS = Quantization("compressed-tensors", [("Linear", WeightScheme("float8", 8))], ["lm_head"])
SPEC = msgspec.structs.replace(QWEN, num_layers=1, layer_windows=[None], quantization=FP8_LAYERS)
MIXTRAL = msgspec.structs.replace(
    SPEC,
    architecture="MixtralForCausalLM",
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=None,
    moe=MoeSpec(2, 1, 8, [True]),
)

Tensors = dict[str, torch.Tensor]


class Names(dict[str, tuple[int, ...]]):
    """Records which tensors a model has."""

    def __call__(self, out: object, name: str, expected_shape: tuple[int, ...], part: object) -> None:
        self[name] = expected_shape


def make_tensors(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> Tensors:
    """A checkpoint's tensors, before they are quantized."""
    names = Names()
    with monkeypatch.context() as patched:
        patched.setattr("raycore.weights.loader.RandomFill", lambda seed: names)
        random_decoder_weights(WeightShare(spec, torch.float32))
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in names.items()}


def is_linear(name: str) -> bool:
    return name.endswith(("_proj.weight", "w1.weight", "w2.weight", "w3.weight"))


def quantized(tensors: Tensors, strategy: str, scale_dtype: torch.dtype = torch.float32) -> Tensors:
    """The tensors as compressed-tensors writes them."""
    stored: Tensors = {}
    for name, tensor in tensors.items():
        stored[name] = tensor
        if is_linear(name):
            rows = tensor if strategy == "channel" else tensor.reshape(1, -1)
            values, scales = quantize_rows(rows)
            stored[name] = values.view(tensor.shape)
            shape = {"channel": scales.shape, "tensor": (1,), "scalar": ()}[strategy]
            stored[f"{name}_scale"] = scales.view(shape).to(scale_dtype)
    return stored


def dequantized(stored: Tensors) -> Tensors:
    return {
        name: tensor.float() * stored[f"{name}_scale"].float() if f"{name}_scale" in stored else tensor
        for name, tensor in stored.items()
        if not name.endswith("_scale")
    }


def write(path: Path, tensors: Tensors) -> Path:
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    return path


def numbers(weight: object) -> torch.Tensor:
    if isinstance(weight, Fp8Weight):
        assert weight.values_OI.dtype == FP8
        assert weight.scales_O.dtype == torch.float32
        return weight.values_OI.float() * weight.scales_O.unsqueeze(1)
    assert isinstance(weight, torch.Tensor)
    return weight


def tensors_of(weights: DecoderWeights) -> dict[str, torch.Tensor]:
    """All weights of a rank, as plain numbers."""
    parts = {"embed": weights.embed_VD, "head": weights.lm_head_VD, "norm": weights.final_norm_D}
    for layer in weights.layers:
        parts |= vars(layer) | vars(layer.feed_forward)
    return {name: numbers(part) for name, part in parts.items() if isinstance(part, torch.Tensor | Fp8Weight)}


def check_same(found: DecoderWeights, expected: DecoderWeights, rtol: float = 1e-6) -> None:
    plain = tensors_of(expected)
    assert tensors_of(found).keys() == plain.keys()
    for name, tensor in tensors_of(found).items():
        torch.testing.assert_close(tensor.float(), plain[name].float(), rtol=rtol, atol=0, msg=name)


@pytest.mark.parametrize("strategy", ["channel", "tensor", "scalar"])
@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("is_staged", [False, True])
def test_weights_stored_in_fp8_are_kept_in_fp8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, tp_size: int, is_staged: bool
) -> None:
    stored = quantized(make_tensors(SPEC, monkeypatch), strategy)
    path, plain = write(tmp_path / "fp8", stored), write(tmp_path / "plain", dequantized(stored))
    for tp_rank in range(tp_size):
        staging = Staging(CPU, buffer_bytes=100) if is_staged else None
        found = load_decoder_weights(
            WeightShare(SPEC, torch.float32, tp_rank, tp_size, formats=STORED_FP8), path, staging=staging
        )
        layer = found.layers[0]
        assert isinstance(layer.feed_forward, MlpWeights)
        for weight in (layer.mixer.qkv_OD, layer.mixer.o_DO, layer.feed_forward.gate_up_FD, layer.feed_forward.down_DF):
            assert isinstance(weight, Fp8Weight)
        assert isinstance(found.lm_head_VD, torch.Tensor)
        check_same(found, load_decoder_weights(WeightShare(SPEC, torch.float32, tp_rank, tp_size), plain))


@pytest.mark.parametrize("spec", [SPEC, MIXTRAL], ids=["dense", "experts"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_staged", [False, True])
def test_weights_stored_in_fp8_are_converted_if_fp8_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: ModelSpec, dtype: torch.dtype, is_staged: bool
) -> None:
    stored = quantized(make_tensors(spec, monkeypatch), "channel", torch.bfloat16)
    path, plain = write(tmp_path / "fp8", stored), write(tmp_path / "plain", dequantized(stored))
    for tp_rank in range(2):
        staging = Staging(CPU, buffer_bytes=100) if is_staged else None
        found = load_decoder_weights(WeightShare(spec, dtype, tp_rank, 2), path, staging=staging)
        assert {tensor.dtype for tensor in tensors_of(found).values()} == {dtype}
        assert not any(isinstance(part, Fp8Weight) for part in vars(found.layers[0]).values())
        check_same(found, load_decoder_weights(WeightShare(spec, dtype, tp_rank, 2), plain))
    assert isinstance(found.layers[0].feed_forward, MoeWeights if spec.moe else MlpWeights)


def test_layers_not_stored_in_fp8_are_loaded_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of which only a part is in fp8 is converted."""
    tensors = make_tensors(SPEC, monkeypatch)
    stored = quantized(tensors, "channel")
    for name in ("self_attn.o_proj", "self_attn.k_proj"):
        del stored[f"model.layers.0.{name}.weight_scale"]
        stored[f"model.layers.0.{name}.weight"] = tensors[f"model.layers.0.{name}.weight"]
    path, plain = write(tmp_path / "fp8", stored), write(tmp_path / "plain", dequantized(stored))
    found = load_decoder_weights(WeightShare(SPEC, torch.float32, formats=STORED_FP8), path)
    layer = found.layers[0]
    assert [isinstance(weight, Fp8Weight) for weight in (layer.mixer.qkv_OD, layer.mixer.o_DO)] == [False, False]
    assert isinstance(layer.feed_forward, MlpWeights)
    assert isinstance(layer.feed_forward.down_DF, Fp8Weight)
    check_same(found, load_decoder_weights(WeightShare(SPEC, torch.float32), plain))


@pytest.mark.parametrize("tp_size", [1, 2])
def test_weights_are_rounded_to_fp8_while_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp_size: int
) -> None:
    path = write(tmp_path, make_tensors(SPEC, monkeypatch))
    for tp_rank in range(tp_size):
        plain = load_decoder_weights(WeightShare(SPEC, torch.float32, tp_rank, tp_size), path).layers[0]
        for staging in (None, Staging(CPU, buffer_bytes=100)):
            found = load_decoder_weights(
                WeightShare(SPEC, torch.float32, tp_rank, tp_size, formats=EVERY_FP8), path, staging=staging
            )
            for name in ("qkv_OD", "o_DO"):
                values, scales = quantize_rows(getattr(plain.mixer, name))
                weight = getattr(found.layers[0].mixer, name)
                assert torch.equal(weight.values_OI.float(), values.float())
                assert torch.equal(weight.scales_O, scales.view(-1))
            assert torch.equal(numbers(found.layers[0].before_attention_D), plain.before_attention_D)


def test_random_weights_are_rounded_to_fp8() -> None:
    plain = random_decoder_weights(WeightShare(SPEC, torch.float32, 1, 2), seed=5)
    rounded = random_decoder_weights(WeightShare(SPEC, torch.float32, 1, 2, formats=STORED_FP8), seed=5)
    assert isinstance(rounded.layers[0].mixer.qkv_OD, Fp8Weight)
    for name, tensor in tensors_of(rounded).items():
        expected = tensors_of(plain)[name]
        assert (tensor - expected).norm() <= 0.05 * expected.norm()


@pytest.mark.parametrize(
    ("name", "change", "fragments"),
    [
        ("o_proj.weight", lambda tensor: tensor.view(torch.int8), ["stored as torch.int8", "expected float8_e4m3fn"]),
        (
            "o_proj.weight_scale",
            lambda tensor: tensor[:5].clone(),
            ["(5, 1)", "32 rows", "config.json has no sizes of blocks"],
        ),
        ("o_proj.weight_scale", lambda tensor: tensor.double(), ["o_proj.weight_scale", "torch.float64"]),
        ("o_proj.weight_scale", None, ["o_proj.weight", "stored as torch.float8_e4m3fn", "expected float32"]),
    ],
)
def test_damaged_fp8_scales_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, change, fragments: list[str]
) -> None:
    stored = quantized(make_tensors(SPEC, monkeypatch), "channel")
    name = f"model.layers.0.self_attn.{name}"
    tensor = stored.pop(name)
    if change is not None:
        stored[name] = change(tensor)
    path = write(tmp_path / "fp8", stored)
    for staging in (None, Staging(CPU)):
        with pytest.raises(InvalidCheckpoint) as raised:
            load_decoder_weights(WeightShare(SPEC, torch.float32, formats=STORED_FP8), path, staging=staging)
        for fragment in fragments:
            assert fragment in str(raised.value)
    shutil.rmtree(path)
