"""How checkpoints name the tensors of a layer that predicts further tokens. Does not import torch.

A model may have been trained to predict the next token but one, too, by a layer after its last one. That layer drafts
(`method="mtp"`: multi-token prediction). Source: DeepSeek-AI, DeepSeek-V3 Technical Report, 2024 (arXiv:2412.19437).
"""

from __future__ import annotations

import msgspec


class MtpNames(msgspec.Struct, frozen=True):
    """What a model's checkpoint calls the tensors of such a layer, and in which order it reads its inputs. The defaults
    are DeepSeek-V3's."""

    layer: str | None = None
    """How the names of the layer's own tensors begin. None: like those of a layer after the model's last one."""
    others: str | None = None
    """How the names of the following tensors begin. None: like the layer's."""
    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    projection: str = "eh_proj"
    """Makes the layer's input of a token's embedding and a hidden state."""
    final_norm: str = "shared_head.norm"
    copies: tuple[str, ...] = ("embed_tokens", "shared_head.head")
    """Those that are the model's own embedding and head once more."""
    reads_hidden_first: bool = False
    """Whether the projection's inputs begin with the hidden state. Otherwise with the embedding."""
