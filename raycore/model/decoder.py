"""The decoder architecture of Llama, Mistral, Mixtral, Qwen2, Qwen3 and Qwen3-MoE.

This module decides the order of a layer's operations; the operations are in `layers`, `rope`, `attention` and
`feed_forward`. Names of tensors end in their shapes: T tokens of the step, R those of the T rows that are kept, D
hidden size, O fused query, key and value rows, N heads, H elements of a head, C pairs of these elements, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from raycore.checkpoint.model_spec import ModelSpec
from raycore.model.experts import ExpertRanks, SplitExperts
from raycore.model.feed_forward import DenseFeedForward, FeedForward, SparseFeedForward
from raycore.model.layers import Linear, ReducedLinear, RMSNorm, TensorParallel, make_linear
from raycore.model.rope import Rope, interleave, rotate_
from raycore.model.rows import TILE_ROWS, AllRows, Rows, TiledRows, keeps_places
from raycore.model.weights.loader import DecoderWeights, LayerWeights, MlpWeights


class Attention(Protocol):
    """Attention of a step's tokens to the keys and values of their own requests."""

    def __call__(self, layer: int, qkv_TO: Tensor) -> Tensor:
        """Store the step's keys and values for this layer, then compute attention. Returns [T, query heads · H]."""
        ...


class Decoder:
    """One tensor-parallel rank's part of a model."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        ranks: TensorParallel,
        max_positions: int,
        device: torch.device,
        experts: ExpertRanks | None = None,
        *,
        batch_invariant: bool = False,
    ) -> None:
        """Build the layers from `weights`. Removes each layer from `weights` once it is built.

        Args:
            experts: the ranks that share the experts. None: the tensor-parallel ranks, each with a part of every
                expert.
            batch_invariant: make the bits of each row's result independent of the other rows.
        """
        self._ranks = ranks
        self._rows: Rows = AllRows()
        if batch_invariant:
            self._rows = TiledRows()
        self.vocab_size = spec.vocab_size
        self._embed_VD = weights.embed_VD.to(device)
        self._vocab_start = weights.vocab_start
        is_tied = weights.lm_head_VD is weights.embed_VD
        self._lm_head = make_linear(self._embed_VD if is_tied else weights.lm_head_VD.to(device))
        self._final_norm = RMSNorm(weights.final_norm_D.to(device), spec.rms_norm_eps, batch_invariant)
        self.num_weights = weights.lm_head_VD.numel() + sum(_num_weights(spec, layer) for layer in weights.layers)
        """Number of multiplications for one token, without those of attention."""
        self._rope = Rope(spec, max_positions, device)
        self._layers: list[_Layer] = []
        for index in range(spec.num_layers):
            own = weights.layers.pop(0)
            layer = _Layer(index, spec, own, ranks, experts or SplitExperts(ranks), device, self._rows)
            self._layers.append(layer)

    def forward(
        self, token_ids_T: Tensor, positions_T: Tensor, attention: Attention, rows_R: Tensor | None = None
    ) -> Tensor:
        """Run all layers. Returns the final hidden states [R, D] of the rows `rows_R` (None: of all rows)."""
        h_TD = self._embed(token_ids_T)
        turns_T1C = self._rope.turns(positions_T)
        for layer in self._layers[:-1]:
            h_TD = layer(h_TD, turns_T1C, attention)
        return self._rows.apply(self._final_norm, self._layers[-1](h_TD, turns_T1C, attention, rows_R))

    def check_tiles(self) -> bool:
        """For batch invariance: test whether a row's result has the same bits wherever in a tile the row is.

        Uses random rows. If the test fails, rows are computed one at a time from now on. All ranks must call this at
        the same time.
        """
        assert isinstance(self._rows, TiledRows), "the decoder isn't batch-invariant"
        generator = torch.Generator().manual_seed(0)

        def random(width: int) -> Tensor:
            return torch.randn(TILE_ROWS, width, generator=generator).to(self._embed_VD)

        turns_T1C = self._rope.turns(torch.arange(TILE_ROWS, device=self._embed_VD.device))
        checks = [keeps_places(self._lm_head, random(self._embed_VD.shape[1]))]
        for layer in self._layers:
            h_TD = random(self._embed_VD.shape[1])
            checks.append(keeps_places(layer.project, h_TD, turns_T1C))
            checks.append(keeps_places(layer.take_in, h_TD, random(layer.attention_width)))
            checks += [keeps_places(function, h_TD) for function in layer.feed_forward.row_functions()]
        num_failures = self._embed_VD.new_tensor([checks.count(False)])
        is_kept = not self._ranks.all_reduce_(num_failures).item()
        if not is_kept:
            self._rows.num_rows = 1
        return is_kept

    def forward_nothing(self) -> None:
        """Take part in a step of the ranks that share experts, although this engine has no token in it."""
        for layer in self._layers:
            layer.feed_forward.forward_nothing()

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Return the logits [R, V] of the whole vocabulary. They are the same on every rank."""
        logits_RV = self._ranks.all_gather_columns(self._rows.apply(self._lm_head, hidden_RD))
        return logits_RV[:, : self.vocab_size] if self._ranks.size > 1 else logits_RV

    def _embed(self, token_ids_T: Tensor) -> Tensor:
        if self._ranks.size == 1:
            return self._embed_VD.index_select(0, token_ids_T)
        local_T = token_ids_T - self._vocab_start
        is_ours_T = (local_T >= 0) & (local_T < len(self._embed_VD))
        h_TD = self._embed_VD.index_select(0, local_T * is_ours_T)
        return self._ranks.all_reduce_(h_TD * is_ours_T.unsqueeze(1))


class _Layer:
    """One decoder layer on one rank."""

    def __init__(
        self,
        index: int,
        spec: ModelSpec,
        weights: LayerWeights,
        ranks: TensorParallel,
        experts: ExpertRanks,
        device: torch.device,
        rows: Rows,
    ) -> None:
        self._index = index
        self._rows = rows
        self._head_dim = spec.head_dim
        self.attention_width = spec.num_heads // ranks.size * spec.head_dim
        self._num_rotated = spec.num_heads // ranks.size + spec.kv_heads_per_rank(ranks.size)
        batch_invariant = isinstance(rows, TiledRows)
        self._input_norm = RMSNorm(weights.input_norm_D.to(device), spec.rms_norm_eps, batch_invariant)
        self._post_norm = RMSNorm(weights.post_norm_D.to(device), spec.rms_norm_eps, batch_invariant)
        self._qk_norm = self._make_qk_norm(spec, weights, ranks, device)
        self._qkv = make_linear(
            self._interleave_rotated(weights.qkv_OD.to(device)),
            None if weights.qkv_bias_O is None else self._interleave_rotated(weights.qkv_bias_O.to(device)),
        )
        self._o = self._reduced(weights.o_DO, weights.o_bias, ranks, device)
        self.feed_forward = self._make_feed_forward(spec, weights, ranks, experts, device)

    def __call__(self, h_TD: Tensor, turns_T1C: Tensor, attention: Attention, rows_R: Tensor | None = None) -> Tensor:
        """Return the layer's output for hidden states, or only for their rows `rows_R`. Overwrites `h_TD`."""
        out_TO = attention(self._index, self._rows.apply(self.project, h_TD, turns_T1C))
        if rows_R is not None:
            h_TD, out_TO = h_TD.index_select(0, rows_R), out_TO.index_select(0, rows_R)
        if self.feed_forward.is_row_wise:
            return self._rows.apply(self._finish, h_TD, out_TO)
        h_TD = self._rows.apply(self.take_in, h_TD, out_TO)
        return self.feed_forward.add_to(h_TD, self._rows.apply(self._post_norm, h_TD))

    def project(self, h_TD: Tensor, turns_T1C: Tensor) -> Tensor:
        """Compute what precedes attention, each row by itself. Returns [T, O]: rotated queries and keys, and values."""
        qkv_TO = self._qkv(self._input_norm(h_TD))
        rotated_TNH = qkv_TO.view(len(qkv_TO), -1, self._head_dim)[:, : self._num_rotated]
        if self._qk_norm is not None:
            self._qk_norm.apply_(rotated_TNH)
        self._rows.elementwise(rotate_, rotated_TNH, turns_T1C)
        return qkv_TO

    def take_in(self, h_TD: Tensor, out_TO: Tensor) -> Tensor:
        """Project attention's results `out_TO`, and add them to `h_TD` in place. Processes each row by itself."""
        return self._o.add_to(h_TD, out_TO)

    def _finish(self, h_TD: Tensor, out_TO: Tensor) -> Tensor:
        """Compute what follows attention, each row by itself."""
        h_TD = self.take_in(h_TD, out_TO)
        return self.feed_forward.add_to(h_TD, self._post_norm(h_TD))

    def _interleave_rotated(self, rows_OX: Tensor) -> Tensor:
        """Apply `interleave`, in place, to the query and key rows of a fused weight or bias."""
        heads_NHX = rows_OX.view(-1, self._head_dim, *rows_OX.shape[1:])
        heads_NHX[: self._num_rotated] = interleave(heads_NHX[: self._num_rotated])
        return rows_OX

    def _make_qk_norm(
        self, spec: ModelSpec, weights: LayerWeights, ranks: TensorParallel, device: torch.device
    ) -> RMSNorm | None:
        """Return the norms of the query and key heads as one norm, or None if the model has no such norms."""
        if weights.q_norm_H is None or weights.k_norm_H is None:
            return None
        num_q, num_kv = spec.num_heads // ranks.size, spec.kv_heads_per_rank(ranks.size)
        weight_NH = torch.cat([weights.q_norm_H.expand(num_q, -1), weights.k_norm_H.expand(num_kv, -1)])
        return RMSNorm(interleave(weight_NH.to(device)), spec.rms_norm_eps, isinstance(self._rows, TiledRows))

    def _make_feed_forward(
        self,
        spec: ModelSpec,
        weights: LayerWeights,
        ranks: TensorParallel,
        experts: ExpertRanks,
        device: torch.device,
    ) -> FeedForward:
        own = weights.feed_forward
        if isinstance(own, MlpWeights):
            gate_up = make_linear(own.gate_up_FD.to(device), _moved(own.gate_up_bias, device))
            return DenseFeedForward(gate_up, self._reduced(own.down_DF, own.down_bias, ranks, device), self._rows)
        assert spec.moe is not None
        is_last = self._index == spec.num_layers - 1
        return SparseFeedForward(spec.moe, own, experts, is_last, device, self._rows)

    @staticmethod
    def _reduced(weight: Tensor, bias: Tensor | None, ranks: TensorParallel, device: torch.device) -> Linear:
        linear = make_linear(weight.to(device), _moved(bias, device))
        return linear if ranks.size == 1 else ReducedLinear(linear, ranks)


def _num_weights(spec: ModelSpec, layer: LayerWeights) -> int:
    own, num_weights = layer.feed_forward, layer.qkv_OD.numel() + layer.o_DO.numel()
    if isinstance(own, MlpWeights):
        return num_weights + own.gate_up_FD.numel() + own.down_DF.numel()
    assert spec.moe is not None
    share_used = spec.moe.num_experts_per_tok / spec.moe.num_experts
    return num_weights + own.router_ED.numel() + int(share_used * (own.gate_up_EFD.numel() + own.down_EDF.numel()))


def _moved(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)
