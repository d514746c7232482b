"""Encoders of images, beside transformers'."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from vision_checkpoints import GEMMA3, KINDS, QWEN2_5, QWEN3, embeddings_of, make_vision_checkpoint
from waiting import LONG_S

from raycore.checkpoint.model_spec import load_model_spec
from raycore.checkpoint.stored_model import fit_model
from raycore.kernels import library
from raycore.layers.native_operations import NativeOperations
from raycore.layers.operations import Operations
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.images.vision.grids import Grid, square_windows
from raycore.parts.images.vision.tower import Tower, make_tower
from raycore.weights.loader import load_decoder_weights
from raycore.weights.share import WeightShare

CPU = torch.device("cpu")
GRIDS: dict[str, list[Grid]] = {
    QWEN2_5: [(1, 4, 4), (1, 8, 8), (1, 6, 10), (1, 2, 14), (2, 6, 4)],
    QWEN3: [(1, 4, 4), (1, 12, 12), (1, 6, 10), (1, 2, 14), (2, 6, 4)],
    GEMMA3: [(1, 4, 4)],
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("vision")
    return {kind: make_vision_checkpoint(kind, directory) for kind in KINDS}


def tower_of(path: Path, operations: Operations, ranks: TensorParallel, dtype: torch.dtype = torch.float32) -> Tower:
    spec = fit_model(load_model_spec(path), path)
    weights = load_decoder_weights(WeightShare(spec, dtype, ranks.rank, ranks.size), path)
    assert spec.vision is not None
    assert weights.vision is not None
    return make_tower(spec.vision, weights.vision, operations, ranks)


def values_of(path: Path, grid: Grid, seed: int = 0) -> torch.Tensor:
    vision = load_model_spec(path).vision
    assert vision is not None
    return torch.randn(vision.input_shape(grid), generator=torch.Generator().manual_seed(seed))


def operations() -> list[Operations]:
    native: list[Operations] = [] if library.load() is None else [NativeOperations()]
    return [Operations(CPU), *native, Operations(CPU, batch_invariant=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_are_those_of_transformers(kind: str, checkpoints: dict[str, Path]) -> None:
    path = checkpoints[kind]
    model = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        towers = [tower_of(path, each, TensorParallel()) for each in operations()]
        for seed, grid in enumerate(GRIDS[kind]):
            values = values_of(path, grid, seed)
            expected = embeddings_of(model, values, grid)
            for tower in towers:
                torch.testing.assert_close(tower(values, grid), expected, rtol=1e-4, atol=1e-4)


class SummingRanks(TensorParallel):
    """Threads that sum with each other."""

    def __init__(self, rank: int, size: int, shared: list[Any], barrier: threading.Barrier) -> None:
        super().__init__(rank, size)
        self._shared = shared
        self._barrier = barrier

    def all_reduce_(self, x: torch.Tensor) -> torch.Tensor:
        self._shared[self.rank] = x
        self._barrier.wait(LONG_S)
        total = sum(self._shared)
        self._barrier.wait(LONG_S)
        return x.copy_(total)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_divide_heads_and_feed_forward_parts(kind: str, checkpoints: dict[str, Path]) -> None:
    path, grid = checkpoints[kind], GRIDS[kind][-1]
    values = values_of(path, grid)
    shared, barrier = [None, None], threading.Barrier(2)

    def encode(rank: int) -> torch.Tensor:
        with torch.no_grad():
            return tower_of(path, Operations(CPU), SummingRanks(rank, 2, shared, barrier))(values, grid)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(encode, range(2)))
    with torch.no_grad():
        alone = tower_of(path, Operations(CPU), TensorParallel())(values, grid)
        not_divided = tower_of(path, Operations(CPU), TensorParallel(2, 4))(values, grid)
    for each in [*found, not_divided]:
        torch.testing.assert_close(each, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_in_16_bits_embeddings_are_near(kind: str, checkpoints: dict[str, Path]) -> None:
    path, grid = checkpoints[kind], GRIDS[kind][-1]
    values = values_of(path, grid)
    with torch.no_grad():
        wide = tower_of(path, Operations(CPU), TensorParallel())(values, grid)
        for each in operations():
            short = tower_of(path, each, TensorParallel(), torch.bfloat16)(values, grid)
            assert short.dtype == torch.bfloat16
            assert torch.nn.functional.cosine_similarity(short.float(), wide).min() > 0.995


def test_every_patch_is_in_one_window() -> None:
    groups = square_windows((2, 10, 6), 2, 2)
    # of 3 by 2 windows of 4 by 4 patches, those at the end have 2 rows or columns
    assert [tuple(group.shape) for group in groups] == [(2, 4), (6, 8), (4, 16)]
    assert sorted(torch.cat([group.reshape(-1) for group in groups]).tolist()) == list(range(2 * 10 * 6))
    # rows 0 to 3 of columns 0 to 3 are the first window: the first and the fourth block of 3 in a row of blocks
    first = next(group for group in groups if 0 in group)
    assert sorted(first[0].tolist()) == [*range(8), *range(12, 20)]
