"""The tensors of a GGUF file under the names that a Hugging Face checkpoint has for them."""

from __future__ import annotations

__all__ = ["gguf_tensors", "named_tensors"]

import re
from pathlib import Path

from raycore.checkpoint.gguf.architectures import Architecture, architecture_of, same_in_layers
from raycore.checkpoint.gguf.header import BLOCKS, GgufFile, GgufTensor, read_gguf
from raycore.checkpoint.stored_tensor import StoredTensor
from raycore.errors import InvalidCheckpoint
from raycore.json_fields import JsonFields

_OF_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ROTATIONS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors of which config.json would have the numbers."""
_OF_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)", re.ASCII)
_MAX_EXPERTS = 4096
_QUERIES, _KEYS = ("attn_q", "attn_k")


def gguf_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of the model in the file `path`, and perhaps in others, by their names in a checkpoint.

    Raises:
        InvalidCheckpoint: a file is missing or damaged, or has a tensor that its architecture hasn't.
        InvalidConfig: as `read_gguf`.
    """
    return named_tensors(read_gguf(path))


def named_tensors(file: GgufFile) -> dict[str, StoredTensor]:
    """Return the tensors of a file, as `gguf_tensors`."""
    names = _Names(file)
    return {name: stored for tensor in file.tensors.values() for name, stored in names.stored(tensor)}


class _Names:
    def __init__(self, file: GgufFile) -> None:
        self._architecture: Architecture = architecture_of(file)
        self._fields = JsonFields(str(file.path), file.metadata)
        self._name = str(file.metadata["general.architecture"])

    def stored(self, tensor: GgufTensor) -> list[tuple[str, StoredTensor]]:
        """Return what a checkpoint has for a tensor: one, several, or none."""
        if tensor.name in _ROTATIONS:
            return []
        stem, _, kind = tensor.name.rpartition(".")
        if stem in _OF_MODEL and kind == "weight":
            return [(f"{_OF_MODEL[stem]}.weight", self._one(tensor, _OF_MODEL[stem]))]
        found = _OF_LAYER.fullmatch(tensor.name)
        part = None if found is None else self._architecture.parts.get(found[2])
        if found is None or part is None:
            raise InvalidCheckpoint(
                f"{tensor.file}: tensor {tensor.name} isn't known in a model of general.architecture={self._name!r}, "
                f"which raycore reads as {self._architecture.name}"
            )
        layer, kind = found[1], found[3]
        if "{}" in part:
            return self._experts(tensor, f"model.layers.{layer}.{part}.{kind}")
        heads = self._num_heads(found[2]) if self._architecture.alternates else 0
        return [(f"model.layers.{layer}.{part}.{kind}", self._one(tensor, part, heads))]

    def _one(self, tensor: GgufTensor, part: str, heads: int = 0) -> StoredTensor:
        shape = tensor.shape
        if part.endswith("shared_expert_gate") and len(shape) == 1:
            shape = (1, *shape)
        if heads and shape[0] % (2 * heads):
            raise InvalidCheckpoint(
                f"{tensor.file}: tensor {tensor.name} has {shape[0]} rows, which {heads} heads with two halves can't "
                "divide"
            )
        added = self._architecture.norm_offset if part.endswith("norm") else 0.0
        return StoredTensor(tensor.file, tensor.type, shape, tensor.start, tensor.end, heads, added)

    def _experts(self, tensor: GgufTensor, name: str) -> list[tuple[str, StoredTensor]]:
        if len(tensor.shape) != 3 or tensor.shape[0] > _MAX_EXPERTS:
            raise InvalidCheckpoint(
                f"{tensor.file}: tensor {tensor.name} has shape {tensor.shape}: expected three dimensions, the first "
                f"for at most {_MAX_EXPERTS} experts"
            )
        num_experts, num_rows, num_columns = tensor.shape
        numbers, size = BLOCKS[tensor.type]
        num_bytes = num_rows * num_columns // numbers * size
        starts = range(tensor.start, tensor.end, num_bytes)
        shape = (num_rows, num_columns)
        return [
            (name.format(expert), StoredTensor(tensor.file, tensor.type, shape, start, start + num_bytes))
            for expert, start in zip(range(num_experts), starts, strict=True)
        ]

    def _num_heads(self, part: str) -> int:
        if part == _QUERIES:
            return same_in_layers(self._fields, f"{self._name}.attention.head_count")
        if part == _KEYS:
            given = self._fields.get(f"{self._name}.attention.head_count_kv")
            return same_in_layers(self._fields, f"{self._name}.attention.head_count" + ("_kv" if given else ""))
        return 0
