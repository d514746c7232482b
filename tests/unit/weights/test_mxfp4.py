"""Experts in MXFP4 are, or become, the numbers that transformers makes of them."""

from __future__ import annotations

from pathlib import Path

import configs
import msgspec
import mxfp4
import pytest
import torch
from native_kernels import needs_kernels
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from raycore.checkpoint.weight_files import read_header
from raycore.layers.native_operations import NativeOperations
from raycore.models.quantization import Quantization, WeightScheme
from raycore.models.spec import ClampedSwiglu
from raycore.parts.experts.layers.routed_experts import TorchExperts
from raycore.parts.experts.models import ExpertChoice, ExpertShare, MoeSpec
from raycore.parts.experts.weights import MoeWeights
from raycore.weights.checkpoint_reader import CheckpointReader
from raycore.weights.fill import CheckpointFill
from raycore.weights.integer_weight import IntegerWeight
from raycore.weights.linear_formats import CONVERTED, STORED_INTEGERS
from raycore.weights.loader import RankLayout
from raycore.weights.mxfp4 import read_mxfp4
from raycore.weights.share import WeightShare

SHAPE = 3, 6, 96


def random_blocks(directory: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Every number of 4 bits, and scales of many sizes, in a file."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (*SHAPE[:2], 3, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 150, (*SHAPE[:2], 3), dtype=torch.uint8, generator=generator)
    # an odd number of bytes before them: nothing promises that words can lie where they lie
    first = torch.zeros(1, dtype=torch.uint8)
    save_file({"a": first, "w_blocks": blocks, "w_scales": scales}, directory / "m.safetensors")
    return blocks, scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outputs", [slice(None), slice(0, 4, 2), slice(3, 6, 2)])
@pytest.mark.parametrize("inputs", [slice(None), slice(32, 64), slice(24, 72)])
def test_read_parts_of_mxfp4_tensors_equal_those_of_the_dequantized_tensor(
    tmp_path: Path, dtype, outputs: slice, inputs: slice
) -> None:
    expected_EIO = convert_moe_packed_tensors(*random_blocks(tmp_path), dtype=dtype)
    with CheckpointReader(tmp_path, read_header(tmp_path / "m.safetensors")) as reader:
        for expert in range(SHAPE[0]):
            found = read_mxfp4(reader, "w", SHAPE, expert, outputs, inputs).dequantize(dtype)
            assert torch.equal(found, expected_EIO[expert].t()[outputs, inputs])


def test_numbers_that_mxfp4_can_hold_are_quantized_exactly(tmp_path: Path) -> None:
    blocks, scales = random_blocks(tmp_path)
    weight_EOI = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    found = convert_moe_packed_tensors(*mxfp4.quantize(weight_EOI), dtype=torch.float32).transpose(1, 2)
    assert torch.equal(found, weight_EOI)


MOE = MoeSpec(3, 2, 96, [True], ExpertChoice(), is_interleaved=True, is_transposed=True)
MXFP4 = Quantization("mxfp4", [], experts=WeightScheme("mxfp4", 4, 32, code="e2m1"))
SPEC = msgspec.structs.replace(configs.SPEC, hidden_size=64, moe=MOE, quantization=MXFP4)


def experts(path: Path, share: ExpertShare, *, is_kept: bool) -> MoeWeights:
    """A rank's weights of a layer in a checkpoint."""
    weight_EOI = torch.randn(3, 192, 64, generator=torch.Generator().manual_seed(1))
    tensors = {"p.mlp.gate.weight": torch.zeros(3, 64)}
    for name, weight in (("gate_up_proj", weight_EOI), ("down_proj", weight_EOI.view(3, 64, 192)[..., :96])):
        blocks, scales = mxfp4.quantize(weight)
        tensors |= {f"p.mlp.experts.{name}_blocks": blocks, f"p.mlp.experts.{name}_scales": scales}
    save_file(tensors, path / "m.safetensors")
    own = WeightShare(SPEC, torch.float32, experts=share, formats=STORED_INTEGERS if is_kept else CONVERTED)
    with CheckpointReader(path, read_header(path / "m.safetensors")) as reader:
        layout = RankLayout(own, reader.__contains__, CheckpointFill(reader, None, None))
        return layout.part(msgspec.structs.replace(MOE, form="mxfp4"), "p.")


@pytest.mark.parametrize("tp_size", [1, 2, 3, 6, 8])
def test_each_rank_keeps_its_part_of_the_experts_in_mxfp4(tmp_path: Path, tp_size: int) -> None:
    for rank in range(tp_size):
        share = MOE.split_experts(rank, tp_size)
        kept, plain = (experts(tmp_path, share, is_kept=is_kept) for is_kept in (True, False))
        for index in range(3):
            found, expected = kept.expert(index), plain.expert(index)
            assert isinstance(found.gate_up_FD, IntegerWeight)
            assert torch.equal(found.gate_up_FD.dequantize(torch.float32), expected.gate_up_FD)
            if tp_size == 8:
                assert torch.equal(found.down_DF, expected.down_DF), "12 inputs fill no word"
            else:
                assert found.down_DF.group_size == (16 if share.rows.start % 32 else 32)
                assert torch.equal(found.down_DF.dequantize(torch.float32), expected.down_DF)


def test_numbers_are_rounded_to_the_nearest_e2m1_numbers() -> None:
    weight = IntegerWeight.empty(1, 16, 4, 16, 16, torch.device("cpu"), "e2m1")
    numbers = [6.0, 0.2, 0.3, 0.7, 0.8, 1.2, 1.3, 1.7, 1.8, 2.4, 2.6, -3.4, -3.6, -4.9, -5.1, 0.0]
    weight.quantize_(torch.tensor([numbers]) * 8)
    expected = [6.0, 0.0, 0.5, 0.5, 1.0, 1.0, 1.5, 1.5, 2.0, 2.0, 3.0, -3.0, -4.0, -4.0, -6.0, 0.0]
    assert (weight.dequantize(torch.float32) / 8).tolist() == [expected]


@needs_kernels
def test_experts_kept_in_mxfp4_compute_as_dequantized_experts(tmp_path: Path) -> None:
    share = MOE.split_experts(0, 1)
    x_ND = torch.randn(7, 64, generator=torch.Generator().manual_seed(2))
    spec = msgspec.structs.replace(MOE, num_experts_per_tok=3)
    kept, plain = (
        TorchExperts(spec, experts(tmp_path, share, is_kept=is_kept), NativeOperations(), ClampedSwiglu(1.7, 7.0))
        for is_kept in (True, False)
    )
    assert isinstance(kept.weights_of(0).gate_up_FD, IntegerWeight)
    expected_ND = plain(x_ND, x_ND)
    assert (kept(x_ND, x_ND) - expected_ND).abs().max() < 1e-3 * expected_ND.abs().max()


def test_ordinary_tensors_count_whatever_config_says(tmp_path: Path) -> None:
    """As in a checkpoint that was dequantized, and still has the old config.json."""
    weight_EIO = torch.randn(3, 64, 192)
    tensors = {
        "p.mlp.gate.weight": torch.zeros(3, 64),
        "p.mlp.experts.gate_up_proj": weight_EIO,
        "p.mlp.experts.down_proj": torch.randn(3, 96, 64),
    }
    save_file(tensors, tmp_path / "m.safetensors")
    with CheckpointReader(tmp_path, read_header(tmp_path / "m.safetensors")) as reader:
        share, fill = WeightShare(SPEC, torch.float32, formats=STORED_INTEGERS), CheckpointFill(reader, None, None)
        layer = RankLayout(share, reader.__contains__, fill).part(msgspec.structs.replace(MOE, form="stacked"), "p.")
    assert torch.equal(layer.gate_up_EFD[1], torch.cat([weight_EIO[1, :, 0::2].t(), weight_EIO[1, :, 1::2].t()]))
