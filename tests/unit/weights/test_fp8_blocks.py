"""Weights in fp8 with a scale for each block: which numbers each rank gets of them, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from families import make_checkpoint
from fp8_blocks import BLOCK, quantize, write_blocks, write_static
from native_kernels import needs_kernels
from prompt_logprobs import prompt_logprobs
from safetensors.torch import load_file, save_file
from torch import Tensor

from raycore.checkpoint.model_spec import load_model_spec
from raycore.checkpoint.stored_model import fit_model
from raycore.errors import InvalidCheckpoint
from raycore.layers.integer_linear import IntegerLinear
from raycore.models.quantization import WeightScheme
from raycore.models.spec import ModelSpec
from raycore.parts.experts.weights import MoeWeights
from raycore.weights.checkpoint_reader import GivenTensors
from raycore.weights.fp8_blocks import read_fp8_blocks
from raycore.weights.fp8_weight import FP8
from raycore.weights.integer_weight import IntegerWeight, kept_group_size
from raycore.weights.linear_formats import GROUPED_FP8
from raycore.weights.loader import load_decoder_weights, random_decoder_weights
from raycore.weights.share import WeightShare

DOWN = "model.layers.0.mlp.down_proj.weight"


def tensors_of(part: object, name: str = "") -> dict[str, Tensor]:
    if isinstance(part, Tensor):
        return {name: part}
    if isinstance(part, IntegerWeight):
        return {name: numbers_of(part)}
    if isinstance(part, list):
        parts = {f"{name}[{index}]": each for index, each in enumerate(part)}
    elif is_dataclass(part):
        parts = {f"{name}.{field.name}": getattr(part, field.name) for field in fields(part)}
    else:
        return {}
    return {key: each for own, content in parts.items() for key, each in tensors_of(content, own).items()}


def numbers_of(weight: IntegerWeight) -> Tensor:
    """Of one weight, or of several that are stacked."""
    if weight.shape[2:]:
        return torch.stack([numbers_of(weight[index]) for index in range(weight.shape[0])])
    return weight.dequantize(torch.float32)


def kept_in(part: object) -> Iterator[IntegerWeight]:
    if isinstance(part, IntegerWeight):
        yield part
    elif isinstance(part, list):
        for each in part:
            yield from kept_in(each)
    elif is_dataclass(part):
        for field in fields(part):
            yield from kept_in(getattr(part, field.name))


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
        converted = load_decoder_weights(WeightShare(spec, torch.float32, **share), path)
        kept = load_decoder_weights(WeightShare(spec, torch.float32, **share, formats=GROUPED_FP8), path)
        expected = tensors_of(load_decoder_weights(WeightShare(plain_spec, torch.float32, **share), plain))
        for found in (tensors_of(converted), tensors_of(kept)):
            assert found.keys() == expected.keys()
            for name, each in expected.items():
                assert torch.equal(found[name], each), (share, name)
        is_divided = share.get("tp_size", 1) > 1  # then some groups are too small
        for layer in kept.layers:
            own = list(kept_in(layer))
            assert len(own) >= (2 if is_divided else 3)
            assert {each.code for each in own} == {"e4m3"}
            if isinstance(layer.feed_forward, MoeWeights):
                assert isinstance(layer.feed_forward.gate_up_EFD, IntegerWeight)
                assert is_divided or isinstance(layer.feed_forward.down_EDF, IntegerWeight)


@pytest.mark.parametrize(
    ("family", "write"), [("llama3", write_blocks), ("mistral4", partial(write_static, scale_dims=3))]
)
def test_kept_layers_compute_what_converted_ones_do(
    tmp_path: Path, family: str, write: Callable[[Path], tuple[Path, Path]]
) -> None:
    """In float32, whose products have the same bits: only what is around them may differ."""
    path, plain = write(make_checkpoint(family, tmp_path))
    assert torch.equal(prompt_logprobs(path), prompt_logprobs(plain))


def test_kept_weights_take_a_byte_for_each_number(tmp_path: Path) -> None:
    path, _ = write_blocks(make_checkpoint("llama3", tmp_path))
    weights = load_decoder_weights(WeightShare(fitted(path), torch.bfloat16, formats=GROUPED_FP8), path)
    for each in kept_in(weights):
        assert each.words_OW.nbytes == each.numel()
        assert each.scales_OG.shape[1] == -(-each.shape[1] // BLOCK[1])


@pytest.mark.parametrize(("first_input", "kept"), [(0, 24), (48, 24), (36, None), (18, None)])
def test_parts_that_begin_inside_blocks_are_kept_if_groups_are_not_too_small(
    first_input: int, kept: int | None
) -> None:
    assert kept_group_size(WeightScheme("float8", 8, block=(12, 24)), 48, first_input) == kept


@needs_kernels
def test_a_weight_that_has_nan_gives_nan(tmp_path: Path) -> None:
    values, scales = torch.randn(16, 32).to(FP8), torch.rand(1, 2)
    values[3, 20] = torch.nan
    reader = GivenTensors({"a.weight": values, "a.weight_scale": scales})
    scheme = WeightScheme("float8", 8, block=(16, 16))
    weight = IntegerWeight.stored(scheme, 16, (16, 32), torch.device("cpu"), short_rows=False)
    weight.fill_(read_fp8_blocks(reader, "a.weight", scheme, (16, 32), (slice(None),)).packed())
    found = IntegerLinear(weight, None)(torch.randn(2, 32)).isnan().any(0)
    assert found.nonzero().tolist() == [[3]]


def test_random_weights_are_kept_as_config_json_says(tmp_path: Path) -> None:
    path, _ = write_blocks(make_checkpoint("llama3", tmp_path))
    spec = load_model_spec(path)
    random = random_decoder_weights(WeightShare(spec, torch.float32, formats=GROUPED_FP8), seed=3)
    plain = tensors_of(random_decoder_weights(WeightShare(spec, torch.float32), seed=3))
    assert len(list(kept_in(random))) == 4 * spec.num_layers
    for name, found in tensors_of(random).items():
        assert (found - plain[name]).norm() < 0.04 * plain[name].norm(), name


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
