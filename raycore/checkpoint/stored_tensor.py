"""Where a tensor of a checkpoint is: in safetensors or GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    file: Path
    dtype: str
    """As safetensors or GGUF has it, such as `BF16` or `Q4_K`."""
    shape: tuple[int, ...]
    start: int
    """Of the tensor's bytes in the file."""
    end: int
    alternating_heads: int = 0
    """In a GGUF file: in each of so many heads, rows of its two halves take turns. 0: rows are in order."""
    added: float = 0.0
    """In a GGUF file: what has been added to each number."""
