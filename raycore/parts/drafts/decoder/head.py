"""What heads that draft have in common: a network of one layer or several, which reads hidden states of its target.

For position i, its input is the embedding of the token at i + 1, and a hidden state of position i. For tokens that the
target has computed, this is made of the target's hidden states (`fuse`). For drafts, it is the head's own output at the
position before. With several layers, each layer after the first one reads the output of the layer before at the
position before, for all tokens. Letters of shapes: as in `decoder`; X: hidden states of several layers side by side.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from raycore.attention.spec import Attention, MixerConstants
from raycore.profile_session import ProfiledParts


class DraftingHead(ABC):
    """One tensor-parallel rank's part of a head."""

    num_layers: int = 1
    """How many layers draft, one after the other: the first one the next token but one, and so on."""
    hidden_size: int
    dtype: torch.dtype
    num_weights: int
    """Number of multiplications for one token, without those of attention."""
    num_key_value_numbers: int
    """How many numbers one token's keys and values have."""
    constants: Sequence[MixerConstants]
    """Of its layers."""

    @abstractmethod
    def fuse(self, states_TX: Tensor) -> Tensor:
        """Return the hidden states [T, D] that the head reads instead of the target's [T, X]."""

    @abstractmethod
    def store(self, token_ids_T: Tensor, hidden_TD: Tensor, attention: Attention, layer: int = 0) -> None:
        """Store a layer's keys and values of the step that `attention` has begun.

        Args:
            token_ids_T: the token after each position.
            hidden_TD: what the layer reads at each position. Isn't changed.
        """

    @abstractmethod
    def forward(self, token_ids_T: Tensor, hidden_TD: Tensor, attention: Attention, layer: int = 0) -> Tensor:
        """Return a layer's hidden states [T, D], for the arguments of `store`. May overwrite `hidden_TD`."""

    @abstractmethod
    def logits(self, hidden_TD: Tensor, layer: int = 0) -> Tensor:
        """Return the logits [T, V] of a layer's hidden states, in the target's vocabulary, the same on all ranks."""

    def parts(self) -> ProfiledParts:
        """The parts of a step, for profiles."""
        yield self, {"fuse": "draft_fc", "store": "draft_store", "forward": "draft_forward", "logits": "draft_lm_head"}
