"""What an encoder has instead of a decoder's parts. Does not import torch."""

from __future__ import annotations

__all__ = ["EncoderNames", "EncoderSpec"]

import msgspec


class EncoderNames(msgspec.Struct, frozen=True):
    """What a checkpoint calls the tensors that only encoders have.

    Those of a layer are without the layer's prefix, the others without that of the model. Names of norms are those of
    modules. None: there is no such norm.
    """

    positions: str = "embeddings.position_embeddings"
    token_types: str = "embeddings.token_type_embeddings"
    embedding_norm: str = "embeddings.LayerNorm"
    attention_norm: str = "attention.output.LayerNorm"
    feed_forward_norm: str = "output.LayerNorm"
    final_norm: str | None = None
    norm_weight: str = "weight"
    norm_bias: str = "bias"


class EncoderSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An encoder's parts. Each of its tokens sees tokens on both sides, and nothing is kept of tokens after a step."""

    norm_eps: float
    has_norm_bias: bool = True
    is_norm_first: bool = False
    """Whether a norm is before its block, which gets the normalized hidden states, and there is one after the last
    layer, but none before the first block, which gets the normalized embeddings. Otherwise it is after the sum of
    hidden states and the block's result."""
    num_positions: int = 0
    """Number of learned positions. 0: there are none."""
    first_position: int = 0
    """The learned position of a prompt's first token."""
    num_token_types: int = 0
    """Number of learned types of tokens. A token of the first text of a pair has type 0, one of the second type 1, as
    far as there are so many."""
    reaches: list[int | None] = []
    """By layer: how many tokens before its own, and after it, a token sees. None: all of the prompt."""
    names: EncoderNames = EncoderNames()
    unused: dict[str, str] = {}
    """Regular expressions of the names of tensors that checkpoints may have and nobody reads, and why."""

    def has_attention_norm(self, layer: int) -> bool:
        """Whether a layer has a norm of attention."""
        return layer > 0 or not self.is_norm_first
