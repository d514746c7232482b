"""Attention as a layer's mixer of tokens: the projections of queries, keys and values, and that of the output.

Names of tensors end in their shapes: T tokens of the step, I inputs of the projections, O fused query, key and value
rows, X anything, N heads, K key-value heads, H elements of a head, V elements of a value head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar, cast

import torch
from torch import Tensor

from raycore.attention.spec import Attention, MixerConstants
from raycore.decoder.mixer import Mixer
from raycore.layers.norm import OwnHeadNorm, WidthNorm
from raycore.layers.operations import Operations
from raycore.layers.part_place import PartPlace
from raycore.layers.rope import PairOrder
from raycore.models.mixers.attention import AttentionHeads
from raycore.models.spec import ModelSpec
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.adapters.weights import LoraLinear
from raycore.weights.attention_weights import AttentionWeights
from raycore.weights.fp8_weight import Fp8Weight
from raycore.weights.gathered import GatheredRows
from raycore.weights.integer_parts import IntegerParts
from raycore.weights.integer_weight import IntegerWeight
from raycore.weights.weight import Weight


class AttentionMixer(Mixer):
    """One rank's attention in one layer."""

    _PARTS: ClassVar[Mapping[str, str]] = {
        "_qkv": "qkv_proj",
        "_qk_norm": "qk_norm",
        "_gate": "gate_proj",
        "o": "o_proj",
    }

    def __init__(self, place: PartPlace, weights: AttentionWeights) -> None:
        spec, ranks, operations = place.spec, place.ranks, place.operations
        heads = cast("AttentionHeads", spec.attention_by_layer[place.index])
        self._stage_index = place.stage_index
        self._rotated = self._rotated_heads(place, heads)
        self._heads = heads.heads(spec, ranks.size)
        self._value_dim, self._value_scale = heads.value_dim, spec.value_scale
        self._is_cached_as_it_is = heads.is_cached_as_it_is(spec)
        self._activation = operations.sigmoid if spec.attention_gate_by == "sigmoid" else operations.softplus
        self._is_gated = spec.attention_gate is not None
        self._order = PairOrder(spec.rotations[place.index], heads.head_dim)
        self._kept = {name: getattr(weights, name) for name in ("q_norm_H", "k_norm_H", "sinks_N")}
        sinks_N = None if weights.sinks_N is None else weights.sinks_N.to(operations.device)
        self.constants = MixerConstants(qk_norm(spec, weights, place.index, ranks.size, operations.device), sinks_N)
        self._qk_norm = self._make_qk_norm(spec, weights, ranks, operations)
        reorder = partial(reorder_heads_, heads=self._rotated, head_dim=heads.head_dim, reordered=self._order.pairs)
        if isinstance(weights.qkv_OD, IntegerParts):
            _reorder_parts_(weights.qkv_OD, weights.qkv_bias_O, reorder)
        else:
            for rows_OX in row_tensors(weights.qkv_OD, weights.qkv_bias_O):
                reorder(rows_OX)
        self._qkv = place.adapt(operations.linear(weights.qkv_OD, weights.qkv_bias_O), "qkv", None)
        self._gate = (
            None if weights.gate_XD is None else place.adapt(operations.linear(weights.gate_XD), "attention_gate", None)
        )
        self.o = place.adapt(operations.linear(weights.o_DO, weights.o_bias, ranks), "o", ranks)

    def _rotated_heads(self, place: PartPlace, heads: AttentionHeads) -> list[slice]:
        """Return which rows of the fused projections are rotated, in heads."""
        return rotated_heads(place.spec, heads, place.ranks.size)

    def __call__(self, x_TI: Tensor, attention: Attention) -> Tensor:
        """Return the result of attention, for the input of the query, key and value projections. Stores the latter."""
        qkv_TO = self._qkv(x_TI)
        if self._qk_norm is not None:
            self._qk_norm.apply_(qkv_TO)
        if self._is_gated:
            return self._gated(x_TI, qkv_TO, attention)
        if self._is_cached_as_it_is:
            return attention(self._stage_index, qkv_TO)
        return self._attend(qkv_TO, attention)

    def _attend(self, qkv_TO: Tensor, attention: Attention) -> Tensor:
        """Return the result of attention, [T, query heads · V], V elements of a value head."""
        if self._is_cached_as_it_is:
            return attention(self._stage_index, qkv_TO)
        heads, num_tokens = self._heads, len(qkv_TO)
        num_rotated = heads.num_heads + heads.num_kv_heads
        padded_TNH = qkv_TO.new_zeros(num_tokens, num_rotated + heads.num_kv_heads, heads.head_dim)
        before_TX, values_TX = qkv_TO.tensor_split([num_rotated * heads.head_dim], 1)
        padded_TNH[:, :num_rotated] = before_TX.view(num_tokens, num_rotated, heads.head_dim)
        values_TKV = values_TX.view(num_tokens, heads.num_kv_heads, self._value_dim)
        torch.mul(values_TKV, self._value_scale, out=padded_TNH[:, num_rotated:, : self._value_dim])
        out_TX = attention(self._stage_index, padded_TNH.flatten(1))
        return out_TX.view(num_tokens, heads.num_heads, heads.head_dim)[..., : self._value_dim].flatten(1)

    def _gated(self, x_TI: Tensor, qkv_TO: Tensor, attention: Attention) -> Tensor:
        """Return the result of attention, multiplied by the sigmoid of the gates.

        Without a projection of their own, each one is after its query head.
        """
        if self._gate is not None:
            gates_TX, num_heads = self._activation(self._gate(x_TI)), self._heads.num_heads
            out_TX = self._attend(qkv_TO, attention)
            # a head has a gate for each element, or for all of them
            gates_TNX = gates_TX.view(len(x_TI), num_heads, gates_TX.shape[1] // num_heads)
            out_TX.view(len(x_TI), num_heads, self._value_dim).mul_(gates_TNX)
            return out_TX
        heads = self._heads
        num_queries = 2 * heads.num_heads * heads.head_dim
        queries_TN2H = qkv_TO[:, :num_queries].view(len(qkv_TO), heads.num_heads, 2, heads.head_dim)
        queries_TX, gates_TX = (queries_TN2H[:, :, half].reshape(len(qkv_TO), -1) for half in (0, 1))
        out_TX = attention(self._stage_index, torch.cat([queries_TX, qkv_TO[:, num_queries:]], 1))
        return out_TX.mul_(self._activation(gates_TX))

    def weights(self) -> AttentionWeights:
        """Return the weights that the mixer was made of."""
        qkv_OD, qkv_bias_O = self._qkv.weight, self._qkv.bias
        assert isinstance(qkv_OD, Tensor), "ranks that exchange weights have converted them"
        qkv_OD, qkv_bias_O = qkv_OD.clone(), None if qkv_bias_O is None else qkv_bias_O.clone()
        for rows_OX in row_tensors(qkv_OD, qkv_bias_O):
            reorder_heads_(rows_OX, self._rotated, self._heads.head_dim, self._order.stored)
        gate_XD = None if self._gate is None else self._gate.weight
        return AttentionWeights(
            qkv_OD=qkv_OD,
            qkv_bias_O=qkv_bias_O,
            gate_XD=gate_XD,
            o_DO=self.o.weight,
            o_bias=self.o.bias,
            **self._kept,
        )

    @staticmethod
    def reorder_adapter_(linears: Mapping[str, LoraLinear], spec: ModelSpec, index: int, tp_size: int) -> None:
        own = cast("AttentionHeads", spec.attention_by_layer[index])
        shape = own.heads(spec, tp_size)
        num_q, num_kv = shape.num_heads * own.query_rows(spec), shape.num_kv_heads * own.head_dim
        every_second = [slice(0, None, 2)] if spec.attention_gate == "query_rows" else [slice(None)]
        order = PairOrder(spec.rotations[index], own.head_dim)
        for part in linears["qkv"].parts if "qkv" in linears else ():
            if part.first_output < num_q + num_kv:
                heads = every_second if part.first_output < num_q else [slice(None)]
                reorder_heads_(part.b_RO.t(), heads, own.head_dim, order.pairs)

    def _make_qk_norm(
        self, spec: ModelSpec, weights: AttentionWeights, ranks: TensorParallel, operations: Operations
    ) -> WidthNorm | OwnHeadNorm | None:
        """Return the norms of queries and keys that come before what `Attention` does. None: there are none."""
        if spec.qk_norm not in ("width", "own_heads"):
            return None
        assert weights.q_norm_H is not None, "the model has such norms"
        assert weights.k_norm_H is not None, "the model has such norms"
        head_dim = self._heads.head_dim
        of_heads = (self._order.pairs(each.view(-1, head_dim)) for each in (weights.q_norm_H, weights.k_norm_H))
        if spec.qk_norm == "own_heads":
            return operations.own_head_norm(torch.cat([*of_heads]), spec.rms_norm_eps)
        q_weight_O, k_weight_O = (each_NH.flatten().float() + spec.norm_offset for each_NH in of_heads)
        return operations.width_norm(q_weight_O, k_weight_O, spec.rms_norm_eps, ranks)


def _reorder_parts_(weight_OI: IntegerParts, bias_O: Tensor | None, reorder: Callable[[Tensor], None]) -> None:
    """Apply `reorder`, which changes the order of rows within heads, to a weight whose parts have whole heads."""
    order_O1 = torch.arange(weight_OI.shape[0]).unsqueeze(1)
    reorder(order_O1)
    for rows, part in weight_OI.placed():
        order_R = order_O1[rows, 0] - rows.start
        for rows_RX in row_tensors(part, None):
            rows_RX.copy_(rows_RX[order_R])
    if bias_O is not None:
        reorder(bias_O)


def row_tensors(weight_OI: Weight, bias_O: Tensor | None) -> list[Tensor]:
    """Return the tensors that have a row for each of a layer's outputs."""
    biases = [] if bias_O is None else [bias_O]
    if isinstance(weight_OI, Fp8Weight):
        # the rows are only moved, and not all devices move fp8
        return [weight_OI.values_OI.view(torch.uint8), weight_OI.scales_O, *biases]
    if isinstance(weight_OI, IntegerWeight):
        return [weight_OI.words_OW, weight_OI.scales_OG, weight_OI.zeros_OG, *biases]
    if isinstance(weight_OI, GatheredRows):
        return [weight_OI.order_O, *biases]
    assert isinstance(weight_OI, Tensor), "parts have tensors of their own"
    return [weight_OI, *biases]


def rotated_heads(spec: ModelSpec, own: AttentionHeads, tp_size: int) -> list[slice]:
    """Return which rows of a rank's fused query, key and value projections are rotated, in heads."""
    shape = own.heads(spec, tp_size)
    num_q, num_kv = shape.num_heads, shape.num_kv_heads
    if spec.attention_gate == "query_rows":
        return [slice(0, 2 * num_q, 2), slice(2 * num_q, 2 * num_q + num_kv)]
    return [slice(0, num_q + num_kv)]


def reorder_heads_(rows_OX: Tensor, heads: list[slice], head_dim: int, reordered: Callable[[Tensor], Tensor]) -> None:
    """Apply `reordered`, in place, to these heads' rows of a fused weight or bias."""
    # what follows them may have other sizes
    end = None if heads[-1].stop is None else heads[-1].stop * head_dim
    heads_NHX = rows_OX[:end].view(-1, head_dim, *rows_OX.shape[1:])
    for some in heads:
        heads_NHX[some] = reordered(heads_NHX[some])


def qk_norm(
    spec: ModelSpec, weights: AttentionWeights, index: int, tp_size: int, device: torch.device
) -> Tensor | None:
    """Return the norm weights of each query and key head [N, H], or None if the model has no norm for each head.

    `index`: the layer's index in the model.
    """
    own = cast("AttentionHeads", spec.attention_by_layer[index])
    shape = own.heads(spec, tp_size)
    if spec.qk_norm == "unit" and spec.rotations[index] is not None:
        return torch.ones(shape.num_heads + shape.num_kv_heads, own.head_dim, device=device)
    if spec.qk_norm != "heads" or weights.q_norm_H is None or weights.k_norm_H is None:
        return None
    weight_NH = torch.cat(
        [weights.q_norm_H.expand(shape.num_heads, -1), weights.k_norm_H.expand(shape.num_kv_heads, -1)]
    )
    return PairOrder(spec.rotations[index], own.head_dim).pairs(weight_NH.to(device))
