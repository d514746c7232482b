"""A head that the target's checkpoint has: layers like the target's, the first of which drafts the next token but one.

It reads the target's final hidden states. Each further layer drafts the token after that, from the hidden states of the
layer before. Tokens are embedded and sampled with the target's embedding and head. Source: DeepSeek-AI, DeepSeek-V3
Technical Report, 2024 (arXiv:2412.19437). Letters of shapes: as in `head`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raycore.attention.spec import Attention
from raycore.decoder.decoder import layer_class, make_norm, num_weights
from raycore.decoder.network import Vocabulary
from raycore.layers.operations import Norm, Operations
from raycore.models.spec import ModelSpec
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.drafts.checkpoint.mtp import MtpSpec
from raycore.parts.drafts.decoder.head import DraftingHead
from raycore.parts.drafts.weights.mtp import MtpWeights
from raycore.parts.experts.parallel import SplitExperts


class MtpHead(DraftingHead):
    """One tensor-parallel rank's part of such a head."""

    def __init__(
        self,
        spec: ModelSpec,
        head: MtpSpec,
        weights: list[MtpWeights],
        ranks: TensorParallel,
        operations: Operations,
        target: Vocabulary,
    ) -> None:
        """`spec`: of the head's layers. Each rank has a part of every expert, however the target's are shared."""
        self._target = target
        self._names = head.names
        self._layers = [
            _MtpLayer(index, spec, head, each, ranks, operations, target) for index, each in enumerate(weights)
        ]
        self.num_layers = len(self._layers)
        self.hidden_size = spec.hidden_size
        self.dtype = weights[0].projection_DX.dtype
        vocabulary = spec.vocab_size * spec.hidden_size // ranks.size
        self.num_weights = vocabulary + sum(
            each.projection_DX.numel() + num_weights(spec, each.layer) for each in weights
        )
        self.num_key_value_numbers = sum(mixer.cached_numbers(spec, ranks.size) for mixer in spec.mixers)
        self.constants = [each.layer.mixer.constants for each in self._layers]

    def fuse(self, states_TX: Tensor) -> Tensor:
        return states_TX

    def store(self, token_ids_T: Tensor, hidden_TD: Tensor, attention: Attention, layer: int = 0) -> None:
        own = self._layers[layer]
        own.layer.mix(own.inputs(token_ids_T, hidden_TD), attention)

    def forward(self, token_ids_T: Tensor, hidden_TD: Tensor, attention: Attention, layer: int = 0) -> Tensor:
        own = self._layers[layer]
        out_TD = own.layer(own.inputs(token_ids_T, hidden_TD), attention)
        return own.final_norm(out_TD) if self._names.reads_normed else out_TD

    def logits(self, hidden_TD: Tensor, layer: int = 0) -> Tensor:
        normed_TD = hidden_TD if self._names.reads_normed else self._layers[layer].final_norm(hidden_TD)
        return self._target.logits(normed_TD)


class _MtpLayer:
    """One layer of a head."""

    def __init__(
        self,
        index: int,
        spec: ModelSpec,
        head: MtpSpec,
        weights: MtpWeights,
        ranks: TensorParallel,
        operations: Operations,
        target: Vocabulary,
    ) -> None:
        def norm(weight_D: Tensor) -> Norm:
            made = make_norm(weight_D, spec, operations)
            assert made is not None
            return made

        self._target = target
        self._reads_hidden_first = head.names.reads_hidden_first
        self._embedding_norm, self._hidden_norm = norm(weights.embedding_norm_D), norm(weights.hidden_norm_D)
        self.final_norm = norm(weights.final_norm_D)
        self._projection = operations.linear(weights.projection_DX)
        make = layer_class(spec)
        self.layer = make(index, index, spec, weights.layer, ranks, SplitExperts(ranks), operations)

    def inputs(self, token_ids_T: Tensor, hidden_TD: Tensor) -> Tensor:
        """Return the input of the layer, [T, D]."""
        halves = [self._embedding_norm(self._target.embed(token_ids_T)), self._hidden_norm(hidden_TD)]
        return self._projection(torch.cat(halves[::-1] if self._reads_hidden_first else halves, dim=1))
