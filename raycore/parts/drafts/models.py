"""The layers of a checkpoint that predict further tokens, and how it names their tensors. Does not import torch.

A model may have been trained to predict the next token but one, too, by a layer after its last one, and with further
layers the tokens after that. They draft (`method="mtp"`: multi-token prediction). Source: DeepSeek-AI, DeepSeek-V3
Technical Report, 2024 (arXiv:2412.19437).
"""

from __future__ import annotations

import msgspec


class MtpNames(msgspec.Struct, frozen=True):
    """What a model's checkpoint calls the tensors of such layers, and what their inputs are. The defaults are
    DeepSeek-V3's. In names, `{}` is the number of a layer, the first of which is 0."""

    layer: str | None = None
    """How the names of a layer's own tensors begin. None: like those of layers after the model's last one."""
    others: str | None = None
    """How the names of the following tensors begin. None: like the layer's. Without a number, layers share them."""
    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    projection: str = "eh_proj"
    """Makes the layer's input of a token's embedding and a hidden state."""
    final_norms: tuple[str, ...] = ("shared_head.norm", "final_layernorm")
    """What the norm before the head may be called. The first one that the files have counts. None: it is the model's.
    """
    copies: tuple[str, ...] = ("embed_tokens", "shared_head.head")
    """Those that are the model's own embedding and head once more."""
    before_feed_forward: str | None = None
    """Within the layer: the norm before its feed-forward part. None: it has the same name as in the model's layers."""
    reads_hidden_first: bool = False
    """Whether the projection's inputs begin with the hidden state. Otherwise with the embedding."""
    reads_normed: bool = True
    """Whether the hidden states that a layer reads have got the norm before the head: the model's, or that of the layer
    before."""
    has_window: bool = False
    """Whether its attention is as that of the model's layers with windows."""
    is_sparse: bool = True
    """Whether its feed-forward part is as that of the model's layers with experts, if there are any."""
