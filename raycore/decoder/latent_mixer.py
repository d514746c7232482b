"""Multi-head latent attention as a layer's mixer of tokens, in the form in which it attends to latents themselves.

A head's key is a linear function of a latent, and so is its value. So the product of a query with a key is that of the
query, multiplied with the key's function, and the latent, and a weighted sum of values is the value's function of the
weighted sum of latents. Attention never makes keys and values of heads. Source: DeepSeek-V2 (arXiv 2405.04434),
section 2.1.2.

Names of tensors end in their shapes: T tokens of the step, I inputs of a layer, O outputs of the fused first layer, N
heads, H elements of a query head, P those that aren't rotated, R size of a latent, W that and the size of the rotated
part, V elements of a value head, X anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, cast

import torch
from torch import Tensor

from raycore.attention.spec import Attention, MixerConstants
from raycore.decoder.attention_mixer import row_tensors
from raycore.decoder.mixer import Mixer, plain
from raycore.layers.part_place import PartPlace
from raycore.layers.rope import PairOrder
from raycore.models.mixers.latent import LatentHeads
from raycore.models.spec import ModelSpec
from raycore.parts.adapters.weights import LoraLinear
from raycore.weights.latent_weights import LatentWeights
from raycore.weights.weight import Weight

_Reordered = Callable[[Tensor], Tensor]
_Reorder = Callable[[Tensor, _Reordered], None]


class LatentMixer(Mixer):
    """One rank's latent attention in one layer."""

    _PARTS: ClassVar[Mapping[str, str]] = {
        "_inputs": "latent_proj",
        "_q_norm": "q_a_layernorm",
        "_q_b": "q_b_proj",
        "_keys": "kv_b_proj_of_keys",
        "_values": "kv_b_proj_of_values",
        "_gate": "g_proj",
        "o": "o_proj",
    }
    _num_beside = 0
    """Number of elements of what attention gets of a token besides queries and keys."""

    def __init__(self, place: PartPlace, weights: LatentWeights) -> None:
        spec, ranks, operations = place.spec, place.ranks, place.operations
        self._stage_index = place.stage_index
        self._heads: LatentHeads = place.mixer
        heads = self._heads
        self._num_heads = spec.num_heads // ranks.size
        self._order = PairOrder(spec.rotations[place.index], heads.rotated_dim)
        self._q_norm_Q, self._kv_norm_R = weights.q_norm_Q, weights.kv_norm_R
        # [1, R], as `AttentionSpec` has the weights of norms
        self.constants = MixerConstants(weights.kv_norm_R.unsqueeze(0).to(operations.device))
        for rows_OX, reorder in self._rotated_rows(weights):
            reorder(rows_OX, self._order.pairs)
        self._inputs = place.adapt(operations.linear(weights.inputs_OD, weights.inputs_bias_O), "qkv", None)
        self._q_norm = self._q_b = None
        if weights.q_norm_Q is not None and weights.q_b_PQ is not None:
            self._q_norm = operations.rms_norm(weights.q_norm_Q, heads.norm_eps)
            self._q_b = place.adapt(operations.linear(weights.q_b_PQ), "q_b", None)
        kv_b_NXR = weights.kv_b_XR.view(self._num_heads, -1, heads.rank)
        self._keys = operations.head_linear(kv_b_NXR[:, : heads.plain_dim].transpose(1, 2).contiguous())
        self._values = operations.head_linear(kv_b_NXR[:, heads.plain_dim :].contiguous())
        self._gate = None if weights.gate_ND is None else place.adapt(operations.linear(weights.gate_ND), "gate", None)
        self._sigmoid = operations.sigmoid
        self.o = place.adapt(operations.linear(weights.o_DY, weights.o_bias, ranks), "o", ranks)

    def __call__(self, x_TI: Tensor, attention: Attention) -> Tensor:
        """Return the values [T, N · V] for the input of the first layer. Stores latents and rotated keys."""
        heads, num_heads, num_tokens = self._heads, self._num_heads, len(x_TI)
        own_TO = self._inputs(x_TI)
        q_TX, key_TW = own_TO[:, : -heads.width], own_TO[:, -heads.width :]
        made_of_TQ = q_TX
        if self._q_norm is not None and self._q_b is not None:
            made_of_TQ = self._q_norm(q_TX)
            q_TX = self._q_b(made_of_TQ)
        q_TNH = q_TX.view(num_tokens, num_heads, heads.query_dim)
        size = (num_heads + 1) * heads.width
        fused_TX = attended_TX = own_TO.new_empty(num_tokens, size + self._num_beside)
        if self._num_beside:
            self._put_beside(x_TI, made_of_TQ, fused_TX[:, size:])
            attended_TX = fused_TX[:, :size]
        fused_TNW = attended_TX.view(num_tokens, num_heads + 1, heads.width)
        self._keys(q_TNH[..., : heads.plain_dim], fused_TNW[:, :-1, : heads.rank])
        fused_TNW[:, :-1, heads.rank :] = q_TNH[..., heads.plain_dim :]
        fused_TNW[:, -1] = key_TW
        out_TX = attention(self._stage_index, fused_TX)
        values_TNV = out_TX.new_empty(num_tokens, num_heads, heads.value_dim)
        self._values(out_TX.view(num_tokens, num_heads, heads.rank), values_TNV)
        if self._gate is not None:
            values_TNV.mul_(self._sigmoid(self._gate(x_TI)).unsqueeze(2))
        return values_TNV.view(num_tokens, -1)

    def _put_beside(self, x_TI: Tensor, made_of_TQ: Tensor, out_TX: Tensor) -> None:
        """Write what attention gets of a token besides queries and keys, `_num_beside` numbers.

        `made_of_TQ`: what queries are made of.
        """

    def weights(self) -> LatentWeights:
        """Return the weights that the mixer was made of. Most are copies."""
        inputs_OD, inputs_bias_O = self._inputs.weight, self._inputs.bias
        q_b_PQ = None if self._q_b is None else self._q_b.weight
        kv_b_NXR = torch.cat([self._keys.weight.transpose(1, 2), self._values.weight], dim=1)
        own = LatentWeights(
            inputs_OD=_copied(inputs_OD),
            inputs_bias_O=None if inputs_bias_O is None else inputs_bias_O.clone(),
            q_b_PQ=None if q_b_PQ is None else _copied(q_b_PQ),
            kv_b_XR=kv_b_NXR.flatten(0, 1),
            gate_ND=None if self._gate is None else plain(self._gate),
            o_DY=self.o.weight,
            o_bias=self.o.bias,
            q_norm_Q=self._q_norm_Q,
            kv_norm_R=self._kv_norm_R,
        )
        for rows_OX, reorder in self._rotated_rows(own):
            reorder(rows_OX, self._order.stored)
        return own

    @staticmethod
    def reorder_adapter_(linears: Mapping[str, LoraLinear], spec: ModelSpec, index: int, tp_size: int) -> None:
        heads, num_heads = cast("LatentHeads", spec.mixers[index]), spec.num_heads // tp_size
        pairs = PairOrder(spec.rotations[index], heads.rotated_dim).pairs
        for part in linears["qkv"].parts if "qkv" in linears else ():
            is_key = part.first_output > 0
            if is_key or heads.query_rank is None:
                reorder_last_(part.b_RO.t(), 1 if is_key else num_heads, heads.rotated_dim, pairs)
        for part in linears["q_b"].parts if "q_b" in linears else ():
            reorder_last_(part.b_RO.t(), num_heads, heads.rotated_dim, pairs)

    def _rotated_rows(self, weights: LatentWeights) -> list[tuple[Tensor, _Reorder]]:
        """Return what has rows that make rotated elements, with what reorders these rows in place."""
        heads = self._heads

        def of_key(rows_OX: Tensor, reordered: _Reordered) -> None:
            reorder_last_(rows_OX[-heads.width :], 1, heads.rotated_dim, reordered)

        def of_queries(rows_OX: Tensor, reordered: _Reordered) -> None:
            reorder_last_(rows_OX[: self._num_heads * heads.query_dim], self._num_heads, heads.rotated_dim, reordered)

        found: list[tuple[Tensor, _Reorder]] = []
        for rows_OX in row_tensors(weights.inputs_OD, weights.inputs_bias_O):
            found.append((rows_OX, of_key))
            if weights.q_b_PQ is None:
                found.append((rows_OX, of_queries))
        if weights.q_b_PQ is not None:
            found += [(rows_OX, of_queries) for rows_OX in row_tensors(weights.q_b_PQ, None)]
        return found


def reorder_last_(rows_OX: Tensor, num_heads: int, num_rotated: int, reordered: _Reordered) -> None:
    """Apply `reordered`, in place, to the rows of each head's last `num_rotated` elements."""
    heads_NHX = rows_OX.view(num_heads, -1, *rows_OX.shape[1:])
    heads_NHX[:, -num_rotated:] = reordered(heads_NHX[:, -num_rotated:])


def _copied(weight_OI: Weight) -> Tensor:
    assert isinstance(weight_OI, Tensor), "ranks that exchange weights have converted them"
    return weight_OI.clone()
