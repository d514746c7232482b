"""Attention to selected tokens.

A token at one of the first K positions sees all tokens up to its own, and dense attention computes it. A later one sees
the K tokens that its layer, or a layer before it, has selected. So what computes a token depends on its position alone.

Shape suffixes: those of `raycore.attention.selection`, and M query heads, W elements of a query or of a key, R those of
a latent.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from raycore.attention.context_share import ContextShare
from raycore.attention.explicit import at_a_time
from raycore.attention.latent import TorchPartialLatentAttention
from raycore.attention.latent_tensors import LatentTensors
from raycore.attention.native_latent import NativePartialLatentAttention
from raycore.attention.spec import Attention, AttentionSpec
from raycore.models.mixers.spec import HeadShape
from raycore.step.batch import Ints, StepInputs
from raycore.step.copies import to_device
from raycore.step.device_batch import StepTensors


class Selection(Protocol):
    """Keeps what selects tokens, and selects them, for one step at a time."""

    num_seen: int
    """How many tokens a token sees at most. Tokens at so many first positions see all up to their own."""

    def begin(
        self, step: StepInputs, tensors: StepTensors, selecting: StepInputs | None, rows_S: Tensor | None
    ) -> None:
        """Prepare for the layers of `step`, whose inputs on the device are `tensors`.

        Args:
            selecting: those of its tokens that don't see all tokens before them. None: there are none.
            rows_S: their rows among all of the step. None: they are all.
        """
        ...

    def store(self, layer: int, beside_TX: Tensor) -> None:
        """Store what later tokens need. `beside_TX`: what attention gets behind queries, keys and values."""
        ...

    def select(self, layer: int, beside_TX: Tensor) -> Tensor:
        """Return what those of the step's tokens see that don't see all, [S, ...], for `AttendsToRows`."""
        ...


class AttendsToRows(Protocol):
    """Attention to some rows of the cache."""

    def begin(self, step: StepInputs, tensors: StepTensors) -> None:
        """Prepare for the layers of `step`, whose inputs on the device are `tensors`."""
        ...

    def store(self, layer: int, qkv_TO: Tensor) -> None:
        """Normalize and rotate queries and keys in place, and store what the cache has of them."""
        ...

    def attend_to_rows(self, layer: int, q_SX: Tensor, selected_SX: Tensor) -> Tensor:
        """Return the attention of queries to what `Selection.select` has returned, as [S, X]."""
        ...


class _Part(NamedTuple):
    """Some tokens of a step."""

    step: StepInputs
    tensors: StepTensors
    rows: Tensor | None
    """int64: theirs, among all of the step. None: they are all."""

    @classmethod
    def of(cls, step: StepInputs, tensors: StepTensors, skipped: Ints, counts: Ints) -> _Part:
        """Return `counts` tokens of each slot after the `skipped` first ones."""
        own = counts > 0
        starts, counts, first_rows = (step.starts + skipped)[own], counts[own], (step.first_rows + skipped)[own]
        if counts.sum() == len(step.positions):
            return cls(step, tensors, None)
        rows = np.arange(int(counts.sum())) + np.repeat(first_rows - (np.cumsum(counts) - counts), counts)
        part = replace(
            step,
            slots=step.slots[own],
            counts=counts,
            starts=starts,
            num_decodes=0,
            token_slots=step.token_slots[rows],
            positions=step.positions[rows],
            sampled=step.sampled[:0],
        )
        rows_S = to_device(rows, tensors.positions_T.device)
        by_token = {name: getattr(tensors, name).index_select(0, rows_S) for name in ("slots_T", "positions_T")}
        return cls(part, replace(tensors, **by_token), rows_S)

    def of_tokens(self, x_TX: Tensor) -> Tensor:
        """Return a copy of the rows of these tokens, or all rows without gaps between them."""
        return x_TX.contiguous() if self.rows is None else x_TX.index_select(0, self.rows)


class SelectedAttention:
    """Computes the attention of one step at a time: call `begin`, then the object itself for every layer."""

    def __init__(
        self,
        heads: HeadShape,
        selection: Selection,
        dense: Attention,
        to_rows: AttendsToRows,
    ) -> None:
        """
        Args:
            dense: attention to all tokens.
            to_rows: attention to some of them.
        """
        num_stored = 1 if heads.latent_rank is not None else 2 * heads.num_kv_heads
        self._num_queries = heads.num_heads * heads.head_dim
        self._num_fused = self._num_queries + num_stored * heads.head_dim
        self._selection, self._dense, self._to_rows = selection, dense, to_rows
        self._whole: _Part | None = None
        self._selecting: _Part | None = None
        self._selected_SX: Tensor | None = None
        """What was selected last in the step."""

    def begin(self, step: StepInputs, tensors: StepTensors) -> None:
        """Prepare for the layers of `step`, whose inputs on the device are `tensors`."""
        num_whole = np.minimum(np.maximum(self._selection.num_seen - step.starts, 0), step.counts)
        num_selecting = step.counts - num_whole
        self._whole = self._selecting = self._selected_SX = None
        if num_whole.any() or not num_selecting.any():
            self._whole = _Part.of(step, tensors, np.zeros_like(num_whole), num_whole)
            self._dense.begin(self._whole.step, self._whole.tensors)
        if num_selecting.any():
            self._selecting = _Part.of(step, tensors, num_whole, num_selecting)
            self._to_rows.begin(self._selecting.step, self._selecting.tensors)
            self._selection.begin(step, tensors, self._selecting.step, self._selecting.rows)
        else:
            self._selection.begin(step, tensors, None, None)

    def __call__(self, layer: int, x_TX: Tensor) -> Tensor:
        """Compute attention in one layer. Where nothing is behind queries, keys and values, the tokens of the step see
        what was selected last."""
        qkv_TO, beside_TX = x_TX[:, : self._num_fused], x_TX[:, self._num_fused :]
        if beside_TX.shape[1]:
            self._selection.store(layer, beside_TX)
            if self._selecting is not None:
                self._selected_SX = None  # frees what the layer before has selected
                self._selected_SX = self._selection.select(layer, beside_TX)
        whole, selecting = self._whole, self._selecting
        if whole is None:
            return self._attend_selected(layer, qkv_TO)
        if selecting is None:
            return self._dense(layer, whole.of_tokens(qkv_TO))
        assert whole.rows is not None, "there are others"
        assert selecting.rows is not None, "there are others"
        # the keys of the former are stored before the latter see them
        whole_SX = self._dense(layer, whole.of_tokens(qkv_TO))
        out_TX = whole_SX.new_empty(len(x_TX), whole_SX.shape[1]).index_copy_(0, whole.rows, whole_SX)
        return out_TX.index_copy_(0, selecting.rows, self._attend_selected(layer, qkv_TO))

    def _attend_selected(self, layer: int, qkv_TO: Tensor) -> Tensor:
        """Return the attention of the tokens that don't see all up to their own."""
        assert self._selecting is not None, "there are some"
        assert self._selected_SX is not None, "this layer has selected, or one before it"
        own_SO = self._selecting.of_tokens(qkv_TO)
        self._to_rows.store(layer, own_SO)
        return self._to_rows.attend_to_rows(layer, own_SO[:, : self._num_queries], self._selected_SX)


class TorchRowAttention(TorchPartialLatentAttention):
    """Plain torch: gathers the rows of some tokens at a time."""

    def __init__(self, spec: AttentionSpec, kv: LatentTensors, *, batch_invariant: bool = False) -> None:
        """`batch_invariant`: make a token's bits independent of the other tokens, by computing it alone."""
        super().__init__(spec, kv, ContextShare(0, 1, kv.block_size), batch_invariant=batch_invariant)

    def attend_to_rows(self, layer: int, q_SX: Tensor, selected_SX: Tensor) -> Tensor:
        """Return the attention of queries to rows of the cache, int32[S, K], as [S, M · R]."""
        q_SMW, (num_tokens, num_keys) = q_SX.reshape(len(q_SX), -1, self._width), selected_SX.shape
        out_SMR = q_SX.new_empty(num_tokens, self._num_heads, self._rank)
        size = 1 if self._batch_invariant else at_a_time(num_keys * max(self._width, self._num_heads))
        for first in range(0, num_tokens, size):
            some = slice(first, first + size)
            keys_SKW = self._kv.rows[layer].index_select(0, selected_SX[some].flatten()).view(-1, num_keys, self._width)
            scores_SMK = torch.bmm(q_SMW[some], keys_SKW.transpose(1, 2)).float().mul_(self._scale)
            weights_SMK = scores_SMK.softmax(-1).to(self._dtype)
            out_SMR[some] = torch.bmm(weights_SMK, keys_SKW[..., : self._rank])
        return out_SMR.flatten(1)


class NativeRowAttention(NativePartialLatentAttention):
    """Native kernels: to them, each token is a sequence whose blocks have one token each."""

    def __init__(self, spec: AttentionSpec, kv: LatentTensors) -> None:
        super().__init__(spec, kv, ContextShare(0, 1, kv.block_size))

    def attend_to_rows(self, layer: int, q_SX: Tensor, selected_SX: Tensor) -> Tensor:
        """Return the attention of queries to rows of the cache, int32[S, K], as [S, M · R]."""
        num_tokens, num_keys = selected_SX.shape
        # by token: its row in the table and in the step, that it is one, and its position
        sequences = torch.tensor([0, 0, 1, num_keys - 1], dtype=torch.int32).repeat(num_tokens, 1)
        sequences[:, :2] = torch.arange(num_tokens, dtype=torch.int32).unsqueeze(1)
        sizes = self._num_heads, self._rank, 1, self._scale, 1, 0
        parts_SX = self._attend(q_SX.contiguous(), self._kv.rows[layer], selected_SX, sequences, *sizes)
        return self.merge(layer, parts_SX.unsqueeze(0))
