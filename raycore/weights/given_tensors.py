"""Tensors in memory, in the form that checkpoints have, which weights are read from as from files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from raycore.errors import InvalidInput
from raycore.weights.checkpoint_reader import CheckpointReader
from raycore.weights.gguf_slice import GgufSlice


class GivenTensors(CheckpointReader):
    """Reads parts of tensors that are given, by name. Some may be in the blocks of GGUF's types."""

    def __init__(self, tensors: Mapping[str, Tensor | GgufSlice]) -> None:
        self._tensors = tensors

    def close(self) -> None:
        """Do nothing: whoever gave the tensors has them."""

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def describe(self, name: str) -> str:
        """Return what errors call the tensor `name`."""
        return f"tensor {name} of the update"

    def _slice(self, name: str) -> Any:
        if name not in self._tensors:
            raise InvalidInput(f"the update has no tensor {name}")
        tensor = self._tensors[name]
        return _Slice(tensor) if isinstance(tensor, Tensor) else tensor


class _Slice:
    """A tensor, with the methods of safetensors' slices."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, part: Any) -> Tensor:
        return self._tensor[part]
