"""A LoRA adapter in a GGUF file, as llama.cpp's convert_lora_to_gguf.py writes it.

Its tensors have the names of those that they change, with `.lora_a` or `.lora_b`. The rows of `lora_b` are in the order
of the model's rows. The file doesn't say how many heads the model has.
"""

from __future__ import annotations

__all__ = ["GgufAdapter", "read_gguf_adapter"]

import re
from pathlib import Path
from typing import NamedTuple

from raycore.checkpoint.gguf.architectures import architectures_named
from raycore.checkpoint.gguf.header import PART_NAME, read_gguf
from raycore.checkpoint.stored_tensor import StoredTensor
from raycore.errors import InvalidCheckpoint
from raycore.json_fields import JsonFields
from raycore.models.spec import ModelSpec

_MAX_HEADER_BYTES = 16 << 20
_TENSOR = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.(\w+)\.weight\.lora_([ab])", re.ASCII)


class GgufAdapter(NamedTuple):
    """The result of `read_gguf_adapter`."""

    metadata: JsonFields
    tensors: dict[str, StoredTensor]
    """By their names in the file. Their rows are read in the order of a Hugging Face checkpoint."""
    modules: dict[str, tuple[int, str, str]]
    """By the name of a tensor: the layer, the projection of that layer, such as `self_attn.q_proj`, and `A` or `B`.
    Tensors of anything else are absent."""


def read_gguf_adapter(path: Path, model: ModelSpec) -> GgufAdapter:
    """Read the header of an adapter in the file `path`, which was trained for `model`.

    Raises:
        InvalidCheckpoint: the file is damaged, has no whole LoRA adapter, or one for another architecture.
        InvalidConfig: as `read_gguf`.
    """
    parts = PART_NAME.fullmatch(path.name)
    if parts is not None and int(parts[3]) > 1:
        # who allows an adapter's path allows no other file
        raise InvalidCheckpoint(f"{path} is named as one of {int(parts[3])} files: an adapter has to be in one file")
    file = read_gguf(path, _MAX_HEADER_BYTES)
    fields = JsonFields(str(path), file.metadata)
    for key, expected in (("general.type", "adapter"), ("adapter.type", "lora")):
        if fields.get(key) != expected:
            raise fields.error(key, f"{expected!r}, as the files of LoRA adapters have it")
    if fields.get("adapter.alora.invocation_tokens") is not None:
        raise fields.error("adapter.alora.invocation_tokens", "no value, because activated LoRA isn't supported")
    architectures = [each for each in architectures_named(fields) if each.name == model.architecture]
    if not architectures:
        raise fields.error("general.architecture", f"that of GGUF files of {model.architecture}, which is the model")
    heads: dict[str, int] = {}
    if architectures[0].alternates:
        heads = {"attn_q": model.num_heads, "attn_k": model.num_kv_heads}
    tensors: dict[str, StoredTensor] = {}
    modules: dict[str, tuple[int, str, str]] = {}
    for name, tensor in file.tensors.items():
        found = _TENSOR.fullmatch(name)
        part = None if found is None else architectures[0].parts.get(found[2])
        alternating = 0
        if found is not None and part is not None:
            modules[name] = int(found[1]), part, found[3].upper()
            alternating = heads.get(found[2], 0) if found[3] == "b" else 0
        tensors[name] = StoredTensor(tensor.file, tensor.type, tensor.shape, tensor.start, tensor.end, alternating)
    return GgufAdapter(fields, tensors, modules)
