"""Reads parts of tensors from a checkpoint's files: safetensors files, with an index if they are several, or GGUF's.

The files are memory-mapped, so only the requested parts are read. This module doesn't know what the tensors are for.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from raycore.checkpoint.gguf.header import is_gguf
from raycore.checkpoint.stored_model import wrong_shape
from raycore.checkpoint.stored_tensor import StoredTensor
from raycore.checkpoint.weight_files import stored_tensors
from raycore.errors import InvalidCheckpoint, InvalidInput
from raycore.weights.gguf_slice import GgufMapping, GgufSlice

READABLE = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of tensors that aren't quantized."""
ANY_DTYPE = (
    *READABLE,
    *(torch.float8_e4m3fn, torch.float8_e8m0fnu),
    *(torch.int64, torch.int32, torch.int8, torch.uint8),
)
"""Those of all tensors that checkpoints may have."""


class CheckpointReader:
    """Reads tensors of the checkpoint in a directory, by name. Close it, or use it in a `with` statement.

    Raises:
        InvalidCheckpoint: raised by any method. The message names the file, the tensor, what was expected and what was
            found.
    """

    def __init__(self, path: Path, tensors: Mapping[str, StoredTensor] | None = None) -> None:
        """`tensors`: by name, those of the checkpoint in the directory `path`. None: what its files say."""
        self._path = path
        self._open_files: dict[Path, Any] = {}
        self._tensors = stored_tensors(path) if tensors is None else tensors

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the files. Tensors that were read stay valid, because they are copies. Views don't."""
        self._open_files.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def names(self) -> list[str]:
        """The names of all tensors, those of a file one after the other."""
        return list(self._tensors)

    def describe(self, name: str) -> str:
        """Return what errors call the tensor `name`, which the checkpoint has."""
        return f"tensor {name} of {self._tensors[name].file}"

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor `name`."""
        return tuple(self._slice(name).get_shape())

    def gguf(self, name: str) -> GgufSlice | None:
        """Return the tensor `name` if it is in a GGUF file, of which a view is a copy in memory."""
        if name not in self:  # weights in integers have several tensors, with other names
            return None
        found = self._slice(name)
        return found if isinstance(found, GgufSlice) else None

    def read(
        self,
        name: str,
        expected_shape: tuple[int, ...],
        dtype: torch.dtype,
        dim: int | None = None,
        start: int = 0,
        length: int | None = None,
    ) -> torch.Tensor:
        """Return a copy of a tensor as `dtype`: all of it, or `length` entries from `start` on along `dim`."""
        shape = list(expected_shape)
        part = [slice(None)] * len(shape)
        if dim is not None:
            shape[dim] = shape[dim] - start if length is None else length
            part[dim] = slice(start, start + shape[dim])
        out = torch.empty(shape, dtype=dtype)
        self.read_into(out, name, expected_shape, tuple(part))
        return out

    def read_into(
        self, out: torch.Tensor, name: str, expected_shape: tuple[int, ...], part: tuple[int | slice, ...]
    ) -> None:
        """Fill `out` with a part of a tensor, converted to `out`'s dtype. `part` is the index that selects the part.

        `expected_shape` is the shape of the whole tensor.
        """
        out.copy_(self.view(name, expected_shape, part))

    def view(
        self,
        name: str,
        expected_shape: tuple[int, ...],
        part: tuple[int | slice, ...],
        dtypes: tuple[torch.dtype, ...] = READABLE,
    ) -> torch.Tensor:
        """Return a part of a tensor as it is stored, in the memory of the mapped file. So it isn't read yet. Of a GGUF
        file, return a copy in memory, in which quantized numbers are dequantized.

        Args:
            expected_shape: the shape of the whole tensor.
            part: the index that selects the part.
            dtypes: the dtypes in which the tensor may be stored.
        """
        found = self._slice(name)
        if tuple(found.get_shape()) != expected_shape:
            raise wrong_shape(self.describe(name), tuple(found.get_shape()), expected_shape)
        view: torch.Tensor = found[part]
        if view.dtype not in dtypes:
            names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
            raise InvalidCheckpoint(f"{self.describe(name)} is stored as {view.dtype}: expected {' or '.join(names)}")
        return view

    def _slice(self, name: str) -> Any:
        tensor = self._tensors.get(name)
        if tensor is None:
            files = sorted({tensor.file.name for tensor in self._tensors.values()})
            raise InvalidCheckpoint(
                f"tensor {name} is missing from {self._path}: its {', '.join(files)} "
                f"hold {len(self._tensors)} other tensors"
            )
        opened = self._open(tensor.file)
        return opened.slice(tensor) if isinstance(opened, GgufMapping) else opened.get_slice(name)

    def _open(self, file: Path) -> Any:
        if file not in self._open_files:
            try:
                self._open_files[file] = GgufMapping(file) if is_gguf(file) else safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise InvalidCheckpoint(
                    f"{file} can't be read: {error}. It is damaged or wasn't downloaded completely: download it again"
                ) from error
        return self._open_files[file]


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
