"""What is set aside for images, beside what they take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from peak_memory import peak_bytes
from vision_checkpoints import GEMMA3, KINDS, make_vision_checkpoint

from raycore.checkpoint.model_spec import load_model_spec
from raycore.layers.operations import Operations
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.images.vision.grids import Grid
from raycore.parts.images.vision.memory import encoder_bytes
from raycore.parts.images.vision.tower import make_tower
from raycore.weights.loader import random_decoder_weights
from raycore.weights.share import WeightShare

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_an_image_needs_no_more_than_is_set_aside(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    spec = load_model_spec(make_vision_checkpoint(kind, tmp_path))
    vision = spec.vision
    assert vision is not None
    vision = msgspec.structs.replace(vision, hidden_size=64, intermediate_size=224, num_layers=vision.num_layers)
    share = WeightShare(msgspec.structs.replace(spec, vision=vision), dtype)
    weights = random_decoder_weights(replace(share)).vision
    assert weights is not None
    tower = make_tower(vision, weights, Operations(CPU), TensorParallel())
    grid: Grid = (1, 4, 4) if kind == GEMMA3 else (1, 40, 28)
    values = torch.randn(vision.input_shape(grid)).numpy()
    limit = encoder_bytes(vision, vision.num_tokens(grid), dtype)
    with torch.inference_mode():
        tower(torch.tensor(values), grid)
        taken = peak_bytes(lambda: tower(torch.tensor(values), grid))
    assert limit / 4 < taken <= limit
