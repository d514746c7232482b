"""One tensor-parallel rank's weights of an encoder of images, read from a checkpoint or random."""

from __future__ import annotations

from torch import Tensor

from raycore.parts.images.checkpoint.vision_tensors import VisionTensor, divides, vision_tensors
from raycore.parts.images.models import VisionSpec
from raycore.weights.share import WeightShare
from raycore.weights.weight import Fill

VisionWeights = dict[str, Tensor]
"""By the keys of `VisionTensor`. What ranks that sum results have only once is empty on the others."""


def vision_weights(share: WeightShare, spec: VisionSpec, fill: Fill) -> VisionWeights:
    """Allocate a rank's weights, and have `fill` fill them, possibly after this function has returned."""
    is_divided = share.tp_size > 1 and divides(spec, share.tp_size)
    rank, size = (share.tp_rank, share.tp_size) if is_divided else (0, 1)
    return {each.key: _of_rank(each, share, fill, rank, size) for each in vision_tensors(spec)}


def _of_rank(tensor: VisionTensor, share: WeightShare, fill: Fill, rank: int, size: int) -> Tensor:
    if tensor.divided == "once" and rank > 0:
        return share.empty(0)
    shape = list(tensor.shape)
    parts = tensor.part(rank, size)
    if tensor.divided in ("outputs", "inputs"):
        shape[0 if tensor.divided == "outputs" else 1] //= size
    out = share.empty(*shape)
    num_rows = shape[0] // len(parts)
    for index, part in enumerate(parts):
        whole = (*part, *[slice(None)] * (len(shape) - len(part)))
        fill(out[index * num_rows : (index + 1) * num_rows], tensor.name, tensor.shape, whole)
    return out
