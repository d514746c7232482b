"""Says which weights of a GGUF file a worker keeps as they are, and which become numbers of its data type."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import torch

from raycore.checkpoint.gguf.header import PLAIN
from raycore.checkpoint.stored_tensor import StoredTensor
from raycore.weights.integer_weight import IntegerWeight
from raycore.weights.loader import RankLayout
from raycore.weights.share import WeightShare
from raycore.weights.weight import Part, Weight


def describe_types(share: WeightShare, tensors: Mapping[str, StoredTensor]) -> str:
    """Return a sentence on the quantized matrices that a worker's share is made of, counted as the file has them. Empty
    if none is quantized.

    Args:
        tensors: those of the file, by their names in a checkpoint.
    """
    kept, converted, outside = Counter[str](), Counter[str](), list[str]()

    def note(out: Weight, name: str, expected_shape: tuple[int, ...], part: Part) -> None:
        kind = tensors[name].dtype
        if kind in PLAIN or len(expected_shape) < 2:
            return
        if ".layers." not in name:
            becomes = "stays integers" if isinstance(out, IntegerWeight) else f"becomes {_name(share.dtype)}"
            outside.append(f"{name.removesuffix('.weight').rpartition('.')[2]} {becomes} ({kind})")
        elif isinstance(out, IntegerWeight):
            kept[kind] += 1
        else:
            converted[kind] += 1

    RankLayout(replace(share, device=torch.device("meta"), gathers=False), tensors.__contains__, note).decoder()
    num_kept, num_converted = kept.total(), converted.total()
    parts: list[str] = []
    if num_kept:
        of = f"{num_kept} of {num_kept + num_converted} quantized linear layers"
        parts.append(f"{of} stay integers ({_counts(kept)})")
    if num_converted:
        what = "" if num_kept else " quantized linear layers"
        parts.append(f"{num_converted}{what} become {_name(share.dtype)} ({_counts(converted)})")
    return ", ".join(parts + outside)


def _counts(found: Counter[str]) -> str:
    return ", ".join(f"{number} {kind}" for kind, number in found.most_common())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
