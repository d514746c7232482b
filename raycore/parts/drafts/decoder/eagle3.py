"""An EAGLE-3 head: a decoder layer that drafts the next token but one, from hidden states of its target.

Letters of shapes: as in `head`; W: tokens that the head can draft.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from raycore.attention.spec import Attention
from raycore.decoder.decoder import Layer, embed, num_weights
from raycore.layers.operations import Operations
from raycore.models.spec import ModelSpec
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.drafts.checkpoint.eagle3 import Eagle3Spec
from raycore.parts.drafts.decoder.head import DraftingHead
from raycore.parts.drafts.weights.eagle3 import Eagle3Weights
from raycore.parts.experts.parallel import SplitExperts

_NOT_DRAFTED = -1e4
"""The logit of tokens that the head can't draft. It is finite, because a request may allow only such tokens."""


class Eagle3Head(DraftingHead):
    """One tensor-parallel rank's part of a head."""

    def __init__(
        self,
        spec: ModelSpec,
        head: Eagle3Spec,
        weights: Eagle3Weights,
        ranks: TensorParallel,
        operations: Operations,
        embed_in_target: Callable[[Tensor], Tensor],
    ) -> None:
        """`embed_in_target`: returns the target's embeddings of tokens, for a head without an embedding."""
        self._ranks = ranks
        self._embed_in_target = embed_in_target
        self._is_normed_before_residual = head.norm_before_residual
        self.vocab_size, self.hidden_size = spec.vocab_size, spec.hidden_size
        self._draft_vocab_size = head.draft_vocab_size
        self.dtype = weights.fc_DX.dtype
        self.num_weights = weights.fc_DX.numel() + num_weights(spec, weights.layer) + weights.lm_head_WD.numel()
        self.num_key_value_numbers = spec.mixers[0].cached_numbers(spec, ranks.size)
        self._embed_VD = None if weights.embed_VD is None else weights.embed_VD.to(operations.device)
        self._vocab_start = weights.vocab_start
        self._fc = operations.linear(weights.fc_DX)
        self._hidden_norm = operations.rms_norm(weights.hidden_norm_D, spec.rms_norm_eps)
        self._layer = Layer(0, 0, spec, weights.layer, ranks, SplitExperts(ranks), operations)
        self.constants = [self._layer.mixer.constants]
        self._final_norm = operations.rms_norm(weights.final_norm_D, spec.rms_norm_eps)
        self._lm_head = operations.head(weights.lm_head_WD, is_tied=False)
        self._token_ids_W = None if weights.token_ids_W is None else weights.token_ids_W.to(operations.device)

    def fuse(self, states_TX: Tensor) -> Tensor:
        return self._fc(states_TX)

    def store(self, token_ids_T: Tensor, hidden_TD: Tensor, attention: Attention, layer: int = 0) -> None:
        self._layer.mixer(self._inputs(token_ids_T, hidden_TD)[0], attention)

    def forward(self, token_ids_T: Tensor, hidden_TD: Tensor, attention: Attention, layer: int = 0) -> Tensor:
        x_TI, residual_TD = self._inputs(token_ids_T, hidden_TD)
        return self._layer.finish(residual_TD, self._layer.mixer(x_TI, attention))

    def logits(self, hidden_TD: Tensor, layer: int = 0) -> Tensor:
        logits_TW = self._ranks.all_gather_columns(self._lm_head(self._final_norm(hidden_TD)))
        logits_TW = logits_TW[:, : self._draft_vocab_size]
        if self._token_ids_W is None:
            return logits_TW
        logits_TV = logits_TW.new_full((len(logits_TW), self.vocab_size), _NOT_DRAFTED)
        return logits_TV.index_copy_(1, self._token_ids_W, logits_TW)

    def _inputs(self, token_ids_T: Tensor, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of the layer's projections, [T, 2·D], and what the layer's results are added to."""
        own = self._embed_VD
        if own is None:
            embedded_TD = self._embed_in_target(token_ids_T)
        else:
            embedded_TD = embed(own, self._vocab_start, token_ids_T, self._ranks)
        normed_TD = self._hidden_norm(hidden_TD)
        assert self._layer.input_norm is not None, "layers of heads are Llama's or Qwen3's"
        x_TI = torch.cat([self._layer.input_norm(embedded_TD), normed_TD], dim=1)
        return x_TI, normed_TD if self._is_normed_before_residual else hidden_TD
