"""One tensor-parallel rank's weights of a head that the target's checkpoint has. Shape suffixes as in `loader`; X: an
embedding and a hidden state side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from raycore.parts.drafts.checkpoint.mtp import MtpSpec
from raycore.weights.fill import RandomFill
from raycore.weights.loader import LayerWeights, RankLayout, fill_weights, has_no_tensor, read_share
from raycore.weights.share import WeightShare
from raycore.weights.weight import Fill, Part, Weight


@dataclass
class MtpWeights:
    """The weights of one layer of a head on one rank. It uses the target's embedding and head for tokens."""

    embedding_norm_D: Tensor
    hidden_norm_D: Tensor
    projection_DX: Tensor
    layer: LayerWeights
    final_norm_D: Tensor


def load_mtp_weights(share: WeightShare, head: MtpSpec, path: Path) -> list[MtpWeights]:
    """Read a worker's share of the layers of the head in its target's checkpoint at `path`. The share is one of these.

    Raises:
        InvalidCheckpoint: a file or a tensor is missing or damaged, or a shape isn't what config.json says.
    """
    return read_share(lambda has_tensor, fill: _allocate(share, head, has_tensor, fill), share, path)


def random_mtp_weights(share: WeightShare, head: MtpSpec, seed: int = 0) -> list[MtpWeights]:
    """Return a worker's share of the layers of a head with random weights."""
    num_threads = None if share.device.type == "cpu" else 1
    return fill_weights(lambda fill: _allocate(share, head, has_no_tensor, fill), RandomFill(seed), None, num_threads)


def mtp_weight_bytes(share: WeightShare, head: MtpSpec) -> int:
    """Return how many bytes a worker's share of a head takes."""
    sizes: list[int] = []

    def note_size(out: Weight, name: str, expected_shape: tuple[int, ...], part: Part) -> None:
        assert isinstance(out, Tensor), "the weights of heads aren't quantized"
        sizes.append(out.nbytes)

    _allocate(replace(share, device=torch.device("meta")), head, has_no_tensor, note_size)
    return sum(sizes)


def _allocate(share: WeightShare, head: MtpSpec, has_tensor: Callable[[str], bool], fill: Fill) -> list[MtpWeights]:
    hidden = share.spec.hidden_size
    layout = RankLayout(share, head.has_tensor(share.spec, has_tensor), fill)
    found: list[MtpWeights] = []
    for index in range(share.spec.num_layers):
        names = head.tensors(share.spec, has_tensor, index)
        found.append(
            MtpWeights(
                embedding_norm_D=layout.norm(names.embedding_norm),
                hidden_norm_D=layout.norm(names.hidden_norm),
                projection_DX=layout.matrix(f"{names.projection}.weight", hidden, 2 * hidden),
                layer=layout.layer(index, names.layer),
                final_norm_D=layout.norm(names.final_norm),
            )
        )
    return found
