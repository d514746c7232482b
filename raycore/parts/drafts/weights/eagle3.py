"""One tensor-parallel rank's weights of an EAGLE-3 head. Shape suffixes as in `loader`; X: what the head reads of the
target, the hidden states of several layers side by side; W: tokens that the head can draft."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from raycore.checkpoint.tensor_shapes import layer_prefix
from raycore.errors import InvalidCheckpoint
from raycore.models.spec import ModelSpec
from raycore.parts.drafts.checkpoint.eagle3 import Eagle3Spec
from raycore.weights.checkpoint_reader import CheckpointReader
from raycore.weights.fill import CheckpointFill, RandomFill
from raycore.weights.loader import LayerWeights, RankLayout, fill_weights, has_no_tensor
from raycore.weights.share import WeightShare
from raycore.weights.staging import NUM_READERS, Staging
from raycore.weights.weight import Fill, Part, Weight

_EMBEDDING = "embed_tokens.weight"
_OFFSETS = "d2t"
"""The tensor with the difference of each drafted token's id in the target's vocabulary and in the head's."""


@dataclass
class Eagle3Weights:
    """The weights of a head on one rank."""

    embed_VD: Tensor | None
    """None: the head uses the target's embedding."""
    vocab_start: int
    """Token id of the first row of `embed_VD`."""
    fc_DX: Tensor
    hidden_norm_D: Tensor
    layer: LayerWeights
    final_norm_D: Tensor
    lm_head_WD: Tensor
    token_ids_W: Tensor | None
    """int64[draft_vocab_size], on the CPU: the target's ids of the tokens that the head drafts. None: they are the
    target's."""


def load_eagle3_weights(share: WeightShare, head: Eagle3Spec, path: Path) -> Eagle3Weights:
    """Read a worker's share of the head at `path`. The share is one of the head's layer.

    Raises:
        InvalidCheckpoint: a file or a tensor is missing or damaged, or a shape isn't what config.json says.
    """
    spec, staging = share.spec, None if share.device.type == "cpu" else Staging(share.device)
    with CheckpointReader(path) as reader:
        if head.target_hidden_size != spec.hidden_size and _EMBEDDING not in reader:
            raise InvalidCheckpoint(
                f"{path} has no {_EMBEDDING}, and its hidden_size={spec.hidden_size} isn't that of the target's "
                f"embedding, {head.target_hidden_size}"
            )
        weights = fill_weights(
            _allocate(share, head, reader.__contains__),
            CheckpointFill(reader, staging, spec.quantization),
            None,
            None if staging is None else NUM_READERS,
        )
        weights.token_ids_W = _drafted_ids(reader, spec, head, path)
    if staging is not None:
        staging.finish()
    return weights


def random_eagle3_weights(share: WeightShare, head: Eagle3Spec, seed: int = 0) -> Eagle3Weights:
    """Return a worker's share of a head with random weights, which drafts the first tokens of the vocabulary."""
    allocate = _allocate(share, head, has_no_tensor)
    weights = fill_weights(allocate, RandomFill(seed), None, None if share.device.type == "cpu" else 1)
    if head.draft_vocab_size < share.spec.vocab_size:
        weights.token_ids_W = torch.arange(head.draft_vocab_size)
    return weights


def eagle3_weight_bytes(share: WeightShare, head: Eagle3Spec) -> int:
    """Return how many bytes a worker's share of a head takes, with an embedding of its own."""
    sizes: list[int] = []

    def note_size(out: Weight, name: str, expected_shape: tuple[int, ...], part: Part) -> None:
        sizes.append(out.numel() * share.dtype.itemsize)

    _allocate(replace(share, device=torch.device("meta")), head, lambda name: name == _EMBEDDING)(note_size)
    return sum(sizes)


def _allocate(
    share: WeightShare, head: Eagle3Spec, has_tensor: Callable[[str], bool]
) -> Callable[[Fill], Eagle3Weights]:
    """Return what `fill_weights` needs."""
    hidden, num_read = share.spec.hidden_size, head.target_hidden_size * len(head.target_layers)
    drafted = replace(share, spec=msgspec.structs.replace(share.spec, vocab_size=head.draft_vocab_size))
    prefix = layer_prefix(has_tensor)

    def allocate(fill: Fill) -> Eagle3Weights:
        whole = RankLayout(share, has_tensor, fill)
        return Eagle3Weights(
            embed_VD=whole.vocabulary(_EMBEDDING) if has_tensor(_EMBEDDING) else None,
            vocab_start=share.vocab_start,
            fc_DX=whole.matrix("fc.weight", hidden, num_read),
            hidden_norm_D=whole.vector(f"{prefix}hidden_norm.weight", hidden),
            layer=whole.layer(0, prefix, num_inputs=2 * hidden),
            final_norm_D=whole.vector("norm.weight", hidden),
            lm_head_WD=RankLayout(drafted, has_tensor, fill).vocabulary("lm_head.weight"),
            token_ids_W=None,
        )

    return allocate


def _drafted_ids(reader: CheckpointReader, spec: ModelSpec, head: Eagle3Spec, path: Path) -> Tensor | None:
    """Return `Eagle3Weights.token_ids_W`."""
    size = head.draft_vocab_size
    if _OFFSETS not in reader:
        if size < spec.vocab_size:
            raise InvalidCheckpoint(f"{path} has no tensor {_OFFSETS}, which draft_vocab_size={size} needs")
        return None
    offsets_W = reader.view(_OFFSETS, (size,), (slice(None),), (torch.int64, torch.int32))
    token_ids_W = torch.arange(size) + offsets_W
    if not ((token_ids_W >= 0) & (token_ids_W < spec.vocab_size)).all():
        raise InvalidCheckpoint(f"tensor {_OFFSETS} of {path} leads to tokens that aren't in the target's vocabulary")
    return token_ids_W
