"""Weights in fp8 with a scale for each block: which numbers each rank gets of them, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path

import msgspec
import pytest
import torch
from families import make_checkpoint
from fp8_blocks import BLOCK, quantize, write_blocks, write_static
from safetensors.torch import load_file, save_file
from torch import Tensor

from raycore.checkpoint.model_spec import load_model_spec
from raycore.checkpoint.stored_model import fit_model
from raycore.errors import InvalidCheckpoint
from raycore.models.quantization import WeightScheme
from raycore.models.spec import ModelSpec
from raycore.weights.checkpoint_reader import GivenTensors
from raycore.weights.fp8_blocks import read_fp8_blocks
from raycore.weights.loader import load_decoder_weights
from raycore.weights.share import WeightShare

DOWN = "model.layers.0.mlp.down_proj.weight"


def tensors_of(part: object, name: str = "") -> dict[str, Tensor]:
    if isinstance(part, Tensor):
        return {name: part}
    if isinstance(part, list):
        parts = {f"{name}[{index}]": each for index, each in enumerate(part)}
    elif is_dataclass(part):
        parts = {f"{name}.{field.name}": getattr(part, field.name) for field in fields(part)}
    else:
        return {}
    return {key: each for own, content in parts.items() for key, each in tensors_of(content, own).items()}


def fitted(path: Path) -> ModelSpec:
    return fit_model(load_model_spec(path), path)


@pytest.mark.parametrize(("family", "is_stacked"), [("llama3", False), ("deepseek_v3", False), ("deepseek_v3", True)])
def test_every_rank_gets_its_part_of_the_numbers(tmp_path: Path, family: str, is_stacked: bool) -> None:
    """Also of experts with tensors of their own, and of those that are in one tensor."""
    check_every_rank(*write_blocks(make_checkpoint(family, tmp_path), is_stacked=is_stacked))


@pytest.mark.parametrize("scale_dims", [0, 1, 3])
def test_every_rank_gets_its_part_of_numbers_with_one_scale(tmp_path: Path, scale_dims: int) -> None:
    """Stacked experts have one scale each, or share one, as Mistral's files have them."""
    check_every_rank(*write_static(make_checkpoint("mistral4", tmp_path), scale_dims))


def check_every_rank(path: Path, plain: Path) -> None:
    """Check the numbers of the checkpoint `path` against those of `plain`."""
    spec, plain_spec = fitted(path), fitted(plain)
    assert spec.quantization is not None
    shares = [{"tp_rank": rank, "tp_size": size} for size in (1, 2) for rank in range(size)]
    if spec.moe is not None:
        shares += [{"experts": spec.moe.whole_experts(rank, 2)} for rank in range(2)]
    for share in shares:
        found = tensors_of(load_decoder_weights(WeightShare(spec, torch.float32, **share), path))
        expected = tensors_of(load_decoder_weights(WeightShare(plain_spec, torch.float32, **share), plain))
        assert found.keys() == expected.keys()
        for name, each in expected.items():
            assert torch.equal(found[name], each), (share, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.float8_e8m0fnu])
def test_scales_may_be_powers_of_two(dtype: torch.dtype) -> None:
    """As bytes, too, which have the exponents. A group of one output and some inputs is a block, too."""
    values, exponents = torch.randn(6, 8).to(torch.float8_e4m3fn), torch.randint(120, 130, (6, 2), dtype=torch.uint8)
    powers = 2.0 ** (exponents.float() - 127)
    scales = exponents if dtype == torch.uint8 else powers.to(dtype)
    reader = GivenTensors({"a.weight": values, "a.weight_scale": scales})
    scheme = WeightScheme("float8", 8, block=(1, 4))
    part = read_fp8_blocks(reader, "a.weight", scheme, (6, 8), (slice(1, 6, 2), slice(2, 7)))
    [(rows, numbers)] = part.dequantized_blocks(torch.float32)
    assert rows == slice(0, 3)
    expected = values.float() * powers.repeat_interleave(4, dim=1)
    assert torch.equal(numbers, expected[1:6:2, 2:7])


def test_the_error_of_numbers_in_blocks_is_that_of_fp8() -> None:
    weight = torch.randn(50, 70)
    _, scales, numbers = quantize(weight)
    assert scales.shape == (5, 3)
    assert (numbers - weight).norm() < 0.04 * weight.norm()


@pytest.mark.parametrize(
    ("name", "change", "fragments"),
    [
        (DOWN, lambda values: values.view(torch.int8), ["stored as torch.int8", "expected float8_e4m3fn"]),
        (f"{DOWN}_scale_inv", lambda scales: scales[:1], ["(1, ", "down_proj.weight_scale_inv"]),
        (f"{DOWN}_scale_inv", lambda scales: scales.double(), ["torch.float64", "down_proj.weight_scale_inv"]),
        (f"{DOWN}_scale_inv", None, ["stored as torch.float8_e4m3fn", "expected float32"]),
    ],
)
def test_damaged_tensors_are_named(
    tmp_path: Path, name: str, change: Callable[[Tensor], Tensor] | None, fragments: list[str]
) -> None:
    path, _ = write_blocks(make_checkpoint("llama3", tmp_path))
    spec, stored = fitted(path), load_file(path / "model.safetensors")
    found = stored.pop(name)
    if change is not None:
        stored[name] = change(found).contiguous()
    save_file(stored, path / "model.safetensors")
    with pytest.raises(InvalidCheckpoint) as raised:
        load_decoder_weights(WeightShare(spec, torch.float32), path)
    for fragment in fragments:
        assert fragment in str(raised.value)


def test_scales_of_experts_in_blocks_without_a_size_are_refused(tmp_path: Path) -> None:
    path, _ = write_static(make_checkpoint("mistral4", tmp_path), 3)
    stored = load_file(path / "model.safetensors")
    name = next(name for name in stored if name.endswith("experts.down_proj_scale_inv"))
    stored[name] = stored[name].repeat(1, 2, 2)
    save_file(stored, path / "model.safetensors")
    with pytest.raises(InvalidCheckpoint, match=r"down_proj_scale_inv has shape .* one for each of the \d+ experts"):
        load_decoder_weights(WeightShare(fitted(path), torch.float32), path)


def test_blocks_of_other_sizes_than_config_json_says_are_refused(tmp_path: Path) -> None:
    path, _ = write_blocks(make_checkpoint("llama3", tmp_path))
    spec = load_model_spec(path)
    assert spec.quantization is not None
    scheme = WeightScheme("float8", 8, block=(BLOCK[0] // 2, BLOCK[1]), scales="weight_scale_inv")
    other = msgspec.structs.replace(spec.quantization, targets=[("Linear", scheme)])
    with pytest.raises(InvalidCheckpoint, match="weight_scale_inv"):
        load_decoder_weights(WeightShare(msgspec.structs.replace(spec, quantization=other), torch.float32), path)
