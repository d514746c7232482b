"""A head that the target's checkpoint has: a layer like the target's, which drafts the next token but one.

It reads the target's final hidden states, and for drafts its own, after its last norm. Tokens are embedded and sampled
with the target's embedding and head. Source: DeepSeek-AI, DeepSeek-V3 Technical Report, 2024 (arXiv:2412.19437).
Letters of shapes: as in `head`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raycore.attention.spec import Attention
from raycore.decoder.decoder import Layer, num_weights
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
        weights: MtpWeights,
        ranks: TensorParallel,
        operations: Operations,
        target: Vocabulary,
    ) -> None:
        """`spec`: of the head's layer. Each rank has a part of every expert, however the target's are shared."""
        self._target = target
        self._reads_hidden_first = head.names.reads_hidden_first
        self.hidden_size = spec.hidden_size
        self.dtype = weights.projection_DX.dtype
        vocabulary = spec.vocab_size * spec.hidden_size // ranks.size
        self.num_weights = weights.projection_DX.numel() + num_weights(spec, weights.layer) + vocabulary
        self.num_key_value_numbers = spec.mixers[0].cached_numbers(spec, ranks.size)

        def norm(weight_D: Tensor) -> Norm:
            return operations.rms_norm(weight_D, spec.rms_norm_eps, spec.norm_offset)

        self._embedding_norm, self._hidden_norm = norm(weights.embedding_norm_D), norm(weights.hidden_norm_D)
        self._final_norm = norm(weights.final_norm_D)
        self._projection = operations.linear(weights.projection_DX)
        self._layer = Layer(0, 0, spec, weights.layer, ranks, SplitExperts(ranks), operations)
        self.constants = [self._layer.mixer.constants]

    def fuse(self, states_TX: Tensor) -> Tensor:
        return states_TX

    def store(self, token_ids_T: Tensor, hidden_TD: Tensor, attention: Attention) -> None:
        self._layer.mix(self._inputs(token_ids_T, hidden_TD), attention)

    def forward(self, token_ids_T: Tensor, hidden_TD: Tensor, attention: Attention) -> Tensor:
        return self._final_norm(self._layer(self._inputs(token_ids_T, hidden_TD), attention))

    def logits(self, hidden_TD: Tensor) -> Tensor:
        return self._target.logits(hidden_TD)

    def _inputs(self, token_ids_T: Tensor, hidden_TD: Tensor) -> Tensor:
        """Return the input of the layer, [T, D]."""
        halves = [self._embedding_norm(self._target.embed(token_ids_T)), self._hidden_norm(hidden_TD)]
        return self._projection(torch.cat(halves[::-1] if self._reads_hidden_first else halves, dim=1))
