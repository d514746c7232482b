"""The heads of models that pool: small layers that compute embeddings or logits from pooled hidden states.

They compute in float32, whatever the model's data type is, and every worker that needs them has them whole. Shape
suffixes: N rows, X inputs, Y outputs.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from raycore.layers.gate import ACTIVATIONS
from raycore.models.spec import TensorNames
from raycore.parts.pooling.models.pooling import (
    HeadActivation,
    HeadLinear,
    HeadNorm,
    HeadPart,
    HeadRows,
    Normalization,
    PoolingSpec,
)
from raycore.weights.checkpoint_reader import CheckpointReader

Layer = Callable[[Tensor], Tensor]
"""Gets float32[N, X], and returns float32[N, Y]. A row of the result depends only on the same row."""
Read = Callable[[str, str, tuple[int, ...], int | None], Tensor]
"""Returns a tensor as float32. Gets the folder below the checkpoint's directory, the name, the shape of the whole
tensor, and the only row that is wanted, or None."""

_DUMMY_STDDEV = 0.02


def normalized(rows: Tensor, activation: Normalization) -> Tensor:
    """Return float32[N, Y] after the activation at the end of a task."""
    if activation == "normalize":
        return functional.normalize(rows, dim=-1)
    if activation == "softmax":
        return rows.softmax(-1)
    if activation == "none":
        return rows
    return torch.sigmoid(rows) if activation == "sigmoid" else torch.tanh(rows)


class Heads:
    """All heads of a model, on one device."""

    def __init__(self, pooling: PoolingSpec, names: TensorNames, read: Read, device: torch.device) -> None:
        """
        Args:
            names: of the model's own tensors.
            read: returns the heads' tensors, which are moved to `device`.
        """
        self._names = names
        self._read = read
        self._device = device
        self.embed = self._layers(pooling.embed)
        self.classify = self._layers(pooling.classify)
        self.token_classify = (
            self.classify if pooling.token_classify == pooling.classify else self._layers(pooling.token_classify)
        )

    def _layers(self, parts: Sequence[HeadPart]) -> list[Layer]:
        return [self._layer(part) for part in parts]

    def _layer(self, part: HeadPart) -> Layer:
        if isinstance(part, HeadActivation):
            return ACTIVATIONS[part.name]
        if isinstance(part, HeadRows):
            name = self._names.embedding if part.table == "embedding" else self._names.head
            weight_YX = torch.cat(
                [self._read("", name, (part.vocab_size, part.num_inputs), token) for token in part.tokens]
            )
            if part.is_difference:
                weight_YX = weight_YX[1:] - weight_YX[:1]
            weight_YX = weight_YX.to(self._device)
            return lambda x_NX: functional.linear(x_NX, weight_YX)
        if isinstance(part, HeadNorm):
            shape = (part.size,)
            weight_X, bias_X = self._tensor(part, part.weight, shape), self._tensor(part, part.bias, shape)
            return lambda x_NX: functional.layer_norm(x_NX, shape, weight_X, bias_X, part.eps)
        weight = self._tensor(part, part.weight, (part.num_outputs, part.num_inputs))
        bias = self._tensor(part, part.bias, (part.num_outputs,))
        assert weight is not None
        return lambda x_NX: functional.linear(x_NX, weight, bias)

    def _tensor(self, part: HeadLinear | HeadNorm, name: str | None, shape: tuple[int, ...]) -> Tensor | None:
        return None if name is None else self._read(part.folder, name, shape, None).to(self._device)


def load_heads(pooling: PoolingSpec, names: TensorNames, path: Path, device: torch.device) -> Heads:
    """Read the heads of the checkpoint in the directory `path`.

    Args:
        names: of the model's own tensors.

    Raises:
        InvalidCheckpoint: a file or a tensor is missing or damaged, or has another shape.
    """
    readers: dict[str, CheckpointReader] = {}

    def read(folder: str, name: str, shape: tuple[int, ...], row: int | None) -> Tensor:
        if folder not in readers:
            readers[folder] = CheckpointReader(path / folder)
        rows = slice(None) if row is None else slice(row, row + 1)
        view = readers[folder].view(name, shape, (rows, *(slice(None),) * (len(shape) - 1)))
        return view.to(torch.float32, copy=True)

    try:
        return Heads(pooling, names, read, device)
    finally:
        for reader in readers.values():
            reader.close()


def random_heads(pooling: PoolingSpec, names: TensorNames, seed: int, device: torch.device) -> Heads:
    """Return heads with random weights, which are functions of the seed and of their tensors' names."""

    def read(folder: str, name: str, shape: tuple[int, ...], row: int | None) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {folder} {name} {row}".encode()))
        size = shape if row is None else (1, *shape[1:])
        return torch.randn(size, generator=generator) * _DUMMY_STDDEV

    return Heads(pooling, names, read, device)
