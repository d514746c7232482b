"""Attention with keys and values of heads, as the model's sizes and parts describe it. Does not import torch."""

from __future__ import annotations

__all__ = ["AttentionHeads"]

from typing import TYPE_CHECKING, ClassVar

from raycore.models.layer_part import ROWS, PartTensor
from raycore.models.linears import FusedLinear
from raycore.models.mixers.spec import NOTHING_CACHED, Cached, Copies, HeadShape, MixerSpec
from raycore.models.rows import Rows, divided, stored_together, whole

if TYPE_CHECKING:
    from raycore.models.spec import ModelSpec

_SINKS = "self_attn.sinks"
"""A tensor with one number for each query head."""


class AttentionHeads(MixerSpec, frozen=True):
    """Attention of heads. `ModelSpec` has its sizes."""

    computed_by: ClassVar[str] = "raycore.decoder.attention_mixer.AttentionMixer"
    weights_class: ClassVar[str] = "raycore.weights.attention_weights.AttentionWeights"
    described: ClassVar[str] = "has attention"
    memory: ClassVar[str] = "raycore.attention.memory.AttentionMemory"

    def linears(
        self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1, num_inputs: int | None = None
    ) -> tuple[FusedLinear, ...]:
        qkv, heads, names = self._qkv(model, tp_rank, tp_size), self._heads(model, tp_rank, tp_size), model.names
        read = whole("", num_inputs or model.hidden_size)
        gate = FusedLinear("gate_XD", (heads._replace(name=names.attention_gate),), read, adapted="attention_gate")
        return (
            FusedLinear(
                "qkv_OD",
                qkv,
                read,
                bias_field="qkv_bias_O",
                biased=frozenset(part.name for part in qkv if model.qkv_bias),
                adapted="qkv",
            ),
            *([gate] if model.attention_gate == "elements" else []),
            FusedLinear(
                "o_DO",
                (whole(names.o, model.hidden_size),),
                heads,
                bias_field="o_bias",
                biased=frozenset([names.o] if model.o_bias else []),
                reads_divided=True,
                adapted="o",
            ),
        )

    def vectors(self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1) -> tuple[PartTensor, ...]:
        found = self._norms(model, tp_rank, tp_size)
        if model.sinks:
            found.append(PartTensor("sinks_N", (divided(_SINKS, model.num_heads, tp_rank, tp_size),)))
        return tuple(found)

    def _norms(self, model: ModelSpec, tp_rank: int, tp_size: int) -> list[PartTensor]:
        q, k, head_dim = f"{model.names.q_norm}.weight", f"{model.names.k_norm}.weight", model.head_dim
        if model.qk_norm is None:
            return []
        if model.qk_norm == "own_heads":
            q_heads = divided(q, model.num_heads, tp_rank, tp_size)
            k_heads = self._key_heads(model, k, tp_rank, tp_size)
            return [_of_heads("q_norm_H", q_heads, head_dim), _of_heads("k_norm_H", k_heads, head_dim)]
        q_norm, k_norm = whole(q, head_dim), whole(k, head_dim)
        if model.qk_norm == "width":
            q_norm = self._heads(model, tp_rank, tp_size)._replace(name=q)
            k_norm = self._keys(model, k, tp_rank, tp_size)
        return [PartTensor("q_norm_H", (q_norm,)), PartTensor("k_norm_H", (k_norm,))]

    def sizes(self, model: ModelSpec, tp_size: int) -> dict[str, int]:
        heads = self.heads(model, tp_size)
        return {
            "query dimensions": heads.num_heads * model.head_dim,
            "query, key and value dimensions": (heads.num_heads + 2 * heads.num_kv_heads) * model.head_dim,
        }

    def heads(self, model: ModelSpec, tp_size: int) -> HeadShape:
        """Return the heads of one of `tp_size` ranks."""
        return HeadShape(model.num_heads // tp_size, model.kv_heads_per_rank(tp_size), model.head_dim)

    def head_norm_eps(self, model: ModelSpec) -> float:
        """Return what the norms of heads add to the mean square."""
        return model.rms_norm_eps

    def copies(self, model: ModelSpec, tp_size: int) -> Copies:
        """Return how many of `tp_size` ranks have the same key-value heads."""
        num, why = max(1, tp_size // model.num_kv_heads), f" and num_key_value_heads={model.num_kv_heads}"
        return Copies(num, "key-value heads", "more workers than key-value heads", why)

    def cached(self, model: ModelSpec, layer: int) -> Cached:
        if model.encoder is not None:
            return NOTHING_CACHED
        window = model.layer_windows[layer]
        return Cached("full" if window is None else "window", window)

    def cached_numbers(self, model: ModelSpec, tp_size: int) -> int:
        return 2 * model.kv_heads_per_rank(tp_size) * model.head_dim

    def _qkv(self, model: ModelSpec, tp_rank: int, tp_size: int) -> tuple[Rows, ...]:
        names = model.names
        return stored_together(
            names.qkv,
            divided(names.q, model.num_heads * model.query_rows, tp_rank, tp_size),
            self._keys(model, names.k, tp_rank, tp_size),
            self._keys(model, names.v, tp_rank, tp_size),
        )

    def _keys(self, model: ModelSpec, name: str, tp_rank: int, tp_size: int) -> Rows:
        total, start, num = self._key_heads(model, name, tp_rank, tp_size)[1:4]
        return Rows(name, total * model.head_dim, start * model.head_dim, num * model.head_dim)

    def _key_heads(self, model: ModelSpec, name: str, tp_rank: int, tp_size: int) -> Rows:
        """Return a tensor that has a row for each key-value head."""
        # with more ranks than key-value heads, neighboring ranks hold the same head
        return Rows(name, model.num_kv_heads, tp_rank * model.num_kv_heads // tp_size, model.kv_heads_per_rank(tp_size))

    def _heads(self, model: ModelSpec, tp_rank: int, tp_size: int) -> Rows:
        """Return the outputs of attention, of which the query projection may have more: see `attention_gate`."""
        return divided("", model.num_heads * model.head_dim, tp_rank, tp_size)


def _of_heads(field: str, heads: Rows, head_dim: int) -> PartTensor:
    """Return the norms of heads: rows of a tensor, or tensors of their own, in whose names `{}` is a head's number."""
    if "{}" not in heads.name:
        return PartTensor(field, (heads,), (ROWS, head_dim))
    own = range(heads.start, heads.start + heads.num)
    return PartTensor(field, tuple(whole(heads.name.format(head), head_dim) for head in own))
