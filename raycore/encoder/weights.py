"""One tensor-parallel rank's weights of an encoder, read from a checkpoint or random.

Shape suffixes: V this rank's rows of the padded vocabulary, D hidden size, P learned positions, K types of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from raycore.weights.attention_weights import AttentionWeights
from raycore.weights.fill import RandomFill
from raycore.weights.layer_part_weights import MlpWeights
from raycore.weights.loader import (
    Progress,
    RankLayout,
    fill_weights,
    has_no_tensor,
    read_share,
)
from raycore.weights.share import WeightShare
from raycore.weights.weight import Fill


@dataclass
class NormWeights:
    """The weights of a layer norm."""

    weight_D: Tensor
    bias_D: Tensor | None


@dataclass
class EncoderLayerWeights:
    """The weights of one layer on one rank."""

    mixer: AttentionWeights
    attention_norm: NormWeights | None
    feed_forward: MlpWeights
    """Of a feed-forward part without a gate, `gate_up_FD` has only the rows of up."""
    feed_forward_norm: NormWeights


@dataclass
class EncoderWeights:
    """The weights of an encoder on one rank. It has only its part of the embedding and of the layers' projections."""

    embed_VD: Tensor
    vocab_start: int
    """Token id of the first row of `embed_VD`."""
    positions_PD: Tensor | None
    token_types_KD: Tensor | None
    embedding_norm: NormWeights
    layers: list[EncoderLayerWeights]
    final_norm: NormWeights | None


def load_encoder_weights(share: WeightShare, path: Path, progress: Progress | None = None) -> EncoderWeights:
    """Read a worker's share of the checkpoint at `path`, converted to the share's data type, to its device.

    `progress`: called after each tensor.

    Raises:
        InvalidCheckpoint: a file or a tensor is missing or damaged, or a shape isn't what the share's spec says.
    """
    return read_share(lambda has_tensor, fill: _EncoderLayout(share, has_tensor, fill).encoder(), share, path, progress)


def random_encoder_weights(share: WeightShare, seed: int = 0) -> EncoderWeights:
    """Return a worker's share of an encoder with random weights, made on its device. Norms have weight 1.

    As `random_decoder_weights`, the model is the same for any number of ranks.
    """
    num_threads = None if share.device.type == "cpu" else 1
    return fill_weights(
        lambda fill: _EncoderLayout(share, has_no_tensor, fill).encoder(), RandomFill(seed), None, num_threads
    )


class _EncoderLayout:
    """Allocates a rank's weights and has `fill` fill them, possibly after a method has returned."""

    def __init__(self, share: WeightShare, has_tensor: Callable[[str], bool], fill: Fill) -> None:
        """`has_tensor`: whether the checkpoint has a tensor of this name."""
        encoder = share.spec.encoder
        assert encoder is not None, "it is an encoder"
        self._share, self._spec, self._encoder = share, share.spec, encoder
        self._rank = RankLayout(share, has_tensor, fill)

    def encoder(self) -> EncoderWeights:
        """Return all weights."""
        names, root, encoder = self._encoder.names, self._spec.names.roots.model, self._encoder
        final_norm = None if names.final_norm is None else self._norm(f"{root}{names.final_norm}")
        return EncoderWeights(
            embed_VD=self._rank.vocabulary(self._spec.names.embedding),
            vocab_start=self._share.vocab_start,
            positions_PD=self._table(f"{root}{names.positions}.weight", encoder.num_positions),
            token_types_KD=self._table(f"{root}{names.token_types}.weight", encoder.num_token_types),
            embedding_norm=self._norm(f"{root}{names.embedding_norm}"),
            layers=[self._layer(index) for index in range(self._spec.num_layers)],
            final_norm=final_norm,
        )

    def _table(self, name: str, num_rows: int) -> Tensor | None:
        return self._rank.matrix(name, num_rows, self._spec.hidden_size) if num_rows else None

    def _layer(self, index: int) -> EncoderLayerWeights:
        prefix, names = self._spec.names.layer(index), self._encoder.names
        has_norm = self._encoder.has_attention_norm(index)
        return EncoderLayerWeights(
            mixer=self._rank.part(self._spec.mixers[index], prefix),
            attention_norm=self._norm(f"{prefix}{names.attention_norm}") if has_norm else None,
            feed_forward=self._rank.part(self._spec.feed_forwards[index], prefix),
            feed_forward_norm=self._norm(f"{prefix}{names.feed_forward_norm}"),
        )

    def _norm(self, name: str) -> NormWeights:
        hidden, names = self._spec.hidden_size, self._encoder.names
        bias = self._rank.vector(f"{name}.{names.norm_bias}", hidden) if self._encoder.has_norm_bias else None
        return NormWeights(self._rank.vector(f"{name}.{names.norm_weight}", hidden), bias)
