"""Experts in MXFP4 become the numbers that transformers makes of them."""

from __future__ import annotations

from pathlib import Path

import mxfp4
import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from raycore.weights.checkpoint_reader import CheckpointReader
from raycore.weights.mxfp4 import read_mxfp4

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
def test_parts_are_those_of_the_numbers(tmp_path: Path, dtype, outputs: slice, inputs: slice) -> None:
    expected_EIO = convert_moe_packed_tensors(*random_blocks(tmp_path), dtype=dtype)
    with CheckpointReader(tmp_path, [tmp_path / "m.safetensors"]) as reader:
        for expert in range(SHAPE[0]):
            found = read_mxfp4(reader, "w", SHAPE, expert, outputs, inputs).dequantize(dtype)
            assert torch.equal(found, expected_EIO[expert].t()[outputs, inputs])


def test_numbers_that_the_format_has_are_written_as_they_are(tmp_path: Path) -> None:
    blocks, scales = random_blocks(tmp_path)
    weight_EOI = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    found = convert_moe_packed_tensors(*mxfp4.quantize(weight_EOI), dtype=torch.float32).transpose(1, 2)
    assert torch.equal(found, weight_EOI)
