"""The tensors of a GGUF file under the names that a Hugging Face checkpoint has for them."""

from __future__ import annotations

__all__ = ["gguf_tensors", "named_tensors"]

import math
import re
from collections.abc import Callable
from pathlib import Path

from raycore.checkpoint.gguf.architectures import Architecture, architecture_of, num_layers, same_in_layers
from raycore.checkpoint.gguf.header import BLOCKS, GgufFile, GgufTensor, read_gguf
from raycore.checkpoint.stored_tensor import StoredTensor
from raycore.errors import InvalidCheckpoint
from raycore.json_fields import JsonFields

Shape = tuple[int, ...]

_OF_MODEL = {"token_embd": "model.embed_tokens", "output": "lm_head"}
_ROTATIONS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors of which config.json would have the numbers."""
_OF_LAYER = re.compile(r"blk\.(\d+)\.([\w.]+)\.(weight|bias)", re.ASCII)
_SHAPES: dict[str, Callable[[Shape], Shape]] = {
    "mlp.shared_expert_gate": lambda shape: (1, *shape) if len(shape) == 1 else shape,
    "mlp.moe_statics.e_score_correction_bias": lambda shape: (1, *shape),
    "conv.conv": lambda shape: (*shape[:1], 1, *shape[1:]),
}
"""Of tensors that have fewer dimensions in GGUF files: the shapes in a checkpoint, by those in the file."""
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
        gguf_norm, norm = self._architecture.last_norm
        self._of_model = _OF_MODEL | {gguf_norm: norm}
        self._end = num_layers(self._fields, self._name)

    def stored(self, tensor: GgufTensor) -> list[tuple[str, StoredTensor]]:
        """Return what a checkpoint has for a tensor: one, several, or none."""
        if tensor.name in _ROTATIONS:
            return []
        stem, _, kind = tensor.name.rpartition(".")
        if stem in self._of_model and (kind == "weight" or stem == self._architecture.last_norm[0]):
            part = self._of_model[stem]
            return [(f"{part}.{kind}", self._one(tensor, part, kind))]
        found, parts = _OF_LAYER.fullmatch(tensor.name), self._architecture.parts
        if found is not None and int(found[1]) >= self._end:
            return []  # it predicts further tokens
        whole = None if found is None else parts.get(f"{found[2]}.{found[3]}")
        part = None if found is None else whole or parts.get(found[2])
        if found is None or part is None:
            raise InvalidCheckpoint(
                f"{tensor.file}: tensor {tensor.name} isn't known in a model of general.architecture={self._name!r}, "
                f"which raycore reads as {self._architecture.name}"
            )
        kind = found[3]
        name = f"model.layers.{found[1]}.{part}" + ("" if whole else f".{kind}")
        if "{}" in part:
            return self._experts(tensor, name)
        heads = self._num_heads(found[2]) if self._architecture.alternates else 0
        return [(name, self._one(tensor, part, kind, heads))]

    def _one(self, tensor: GgufTensor, part: str, kind: str, heads: int = 0) -> StoredTensor:
        shape = _SHAPES.get(part, lambda shape: shape)(tensor.shape)
        if heads and shape[0] % (2 * heads):
            raise InvalidCheckpoint(
                f"{tensor.file}: tensor {tensor.name} has {shape[0]} rows, which {heads} heads with two halves can't "
                "divide"
            )
        added = self._architecture.norm_offset if part.endswith("norm") and kind == "weight" else 0.0
        return StoredTensor(tensor.file, tensor.type, shape, tensor.start, tensor.end, heads, added)

    def _experts(self, tensor: GgufTensor, name: str) -> list[tuple[str, StoredTensor]]:
        num_dims = 2 if "norm" in name else 3
        if len(tensor.shape) != num_dims or tensor.shape[0] > _MAX_EXPERTS:
            raise InvalidCheckpoint(
                f"{tensor.file}: tensor {tensor.name} has shape {tensor.shape}: expected {num_dims} dimensions, the "
                f"first for at most {_MAX_EXPERTS} experts or heads"
            )
        num_experts, *shape = tensor.shape
        numbers, size = BLOCKS[tensor.type]
        num_bytes = math.prod(shape) // numbers * size
        starts = range(tensor.start, tensor.end, num_bytes)
        return [
            (name.format(expert), StoredTensor(tensor.file, tensor.type, tuple(shape), start, start + num_bytes))
            for expert, start in zip(range(num_experts), starts, strict=True)
        ]

    def _num_heads(self, part: str) -> int:
        if part == _QUERIES:
            return same_in_layers(self._fields, f"{self._name}.attention.head_count")
        if part == _KEYS:
            given = self._fields.get(f"{self._name}.attention.head_count_kv")
            return same_in_layers(self._fields, f"{self._name}.attention.head_count" + ("_kv" if given else ""))
        return 0
