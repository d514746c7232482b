"""Attention with keys and values of heads, as the model's sizes and parts describe it. Does not import torch."""

from __future__ import annotations

__all__ = [
    "AttentionHeads",
    "ChunkedHeads",
    "DifferingCaches",
    "DifferingHeads",
    "GroupedHeads",
    "LayerHeads",
    "heads_of",
]

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import msgspec

from raycore.models.layer_part import ROWS, PartTensor, Refusable
from raycore.models.linears import FusedLinear
from raycore.models.mixers.spec import NOTHING_CACHED, Cached, Copies, HeadShape, MixerSpec
from raycore.models.rows import Rows, divided, stored_together, whole

if TYPE_CHECKING:
    from raycore.models.spec import ModelSpec

_WHY = "has layers whose heads differ"


class LayerHeads(msgspec.Struct, frozen=True, kw_only=True):
    """What the attention of a layer has of its own. None: what the model has."""

    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    sinks: bool | None = None
    values_are_keys: bool = False
    """Whether values are what the projection of keys makes, before norms and rotations. There is none of values."""
    source: int | None = None
    """The layer of the model whose keys and values it reads, with `Parts.norms_values`. None: its own."""
    heads_key: str = "num_attention_heads"
    """How `num_heads` follows from config.json."""
    kv_heads_key: str = "num_key_value_heads"
    """How `num_kv_heads` follows from config.json."""


class AttentionHeads(MixerSpec, frozen=True):
    """Attention of heads. Sizes are those of the whole model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Number of elements of a query head, or a key head."""
    value_dim: int
    """Number of elements of a value head, at most `head_dim`. The cache has zeros after them."""
    sinks: bool
    """See `Parts.sinks`."""
    heads_key: str = "num_attention_heads"
    kv_heads_key: str = "num_key_value_heads"
    values_are_keys: bool = False
    """See `LayerHeads`."""

    computed_by: ClassVar[str] = "raycore.decoder.attention_mixer.AttentionMixer"
    weights_class: ClassVar[str] = "raycore.weights.attention_weights.AttentionWeights"
    described: ClassVar[str] = "has attention"
    memory: ClassVar[str] = "raycore.attention.memory.AttentionMemory"

    def renamed(self, model: ModelSpec) -> Mapping[str, str]:
        return {"self_attn.g_proj": model.names.attention_gate} if model.attention_gate == "heads" else {}

    @property
    def split_sizes(self) -> dict[str, int]:
        return {self.heads_key: self.num_heads}

    def shared_sizes(self, model: ModelSpec) -> dict[str, int]:
        return {self.kv_heads_key: self.num_kv_heads}

    @property
    def rope_dim(self) -> int:
        """Number of elements of a head of which a rotation may turn some."""
        return self.head_dim

    def query_rows(self, model: ModelSpec) -> int:
        """Return the number of rows of the query projection for each head."""
        return self.head_dim * (2 if model.attention_gate == "query_rows" else 1)

    def linears(
        self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1, num_inputs: int | None = None
    ) -> tuple[FusedLinear, ...]:
        qkv, names = self._qkv(model, tp_rank, tp_size), model.names
        read, values = whole("", num_inputs or model.hidden_size), self._results(tp_rank, tp_size)
        return (
            FusedLinear(
                "qkv_OD",
                qkv,
                read,
                bias_field="qkv_bias_O",
                biased=frozenset(part.name for part in qkv if model.qkv_bias),
                adapted="qkv",
            ),
            *self._gate(model, read, tp_rank, tp_size),
            FusedLinear(
                "o_DO",
                (whole(names.o, model.hidden_size),),
                values,
                bias_field="o_bias",
                biased=frozenset([names.o] if model.o_bias else []),
                reads_divided=True,
                adapted="o",
            ),
        )

    def vectors(self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1) -> tuple[PartTensor, ...]:
        found = self._norms(model, tp_rank, tp_size)
        if self.sinks:
            found.append(PartTensor("sinks_N", (divided(model.names.sinks, self.num_heads, tp_rank, tp_size),)))
        return tuple(found)

    def _norms(self, model: ModelSpec, tp_rank: int, tp_size: int) -> list[PartTensor]:
        q, k, head_dim = f"{model.names.q_norm}.weight", f"{model.names.k_norm}.weight", self.head_dim
        if model.qk_norm in (None, "unit"):
            return []
        if model.qk_norm == "own_heads":
            q_heads, k_heads = divided(q, self.num_heads, tp_rank, tp_size), self._keys(k, 1, tp_rank, tp_size)
            return [_of_heads("q_norm_H", q_heads, head_dim), _of_heads("k_norm_H", k_heads, head_dim)]
        q_norm, k_norm = whole(q, head_dim), whole(k, head_dim)
        if model.qk_norm == "width":
            q_norm = divided(q, self.num_heads * head_dim, tp_rank, tp_size)
            k_norm = self._keys(k, head_dim, tp_rank, tp_size)
        return [PartTensor("q_norm_H", (q_norm,)), PartTensor("k_norm_H", (k_norm,))]

    def sizes(self, model: ModelSpec, tp_size: int) -> dict[str, int]:
        heads = self.heads(model, tp_size)
        keys_and_values = heads.num_kv_heads * (self.head_dim + self.value_dim)
        return {
            "query dimensions": heads.num_heads * self.value_dim,
            "query, key and value dimensions": heads.num_heads * self.head_dim + keys_and_values,
        }

    def heads(self, model: ModelSpec, tp_size: int) -> HeadShape:
        """Return the heads of one of `tp_size` ranks."""
        return HeadShape(self.num_heads // tp_size, max(1, self.num_kv_heads // tp_size), self.head_dim)

    def is_cached_as_it_is(self, model: ModelSpec) -> bool:
        """Whether the cache has values as the projection makes them: as wide as keys, and not multiplied."""
        return self.value_dim == self.head_dim and model.value_scale == 1.0

    def head_norm_eps(self, model: ModelSpec) -> float:
        """Return what the norms of heads add to the mean square."""
        return model.rms_norm_eps

    def copies(self, model: ModelSpec, tp_size: int) -> Copies:
        """Return how many of `tp_size` ranks have the same key-value heads."""
        num, why = max(1, tp_size // self.num_kv_heads), f" and {self.kv_heads_key}={self.num_kv_heads}"
        return Copies(num, "key-value heads", "more workers than key-value heads", why)

    def cached(self, model: ModelSpec, layer: int) -> Cached:
        if model.encoder is not None:
            return NOTHING_CACHED
        window = model.layer_windows[layer]
        return Cached("full" if window is None else "window", window)

    def cached_numbers(self, model: ModelSpec, tp_size: int) -> int:
        heads = self.heads(model, tp_size)
        return 2 * heads.num_kv_heads * heads.head_dim

    def _qkv(self, model: ModelSpec, tp_rank: int, tp_size: int) -> tuple[Rows, ...]:
        names = model.names
        return stored_together(
            names.qkv,
            divided(names.q, self.num_heads * self.query_rows(model), tp_rank, tp_size),
            self._keys(names.k, self.head_dim, tp_rank, tp_size),
            *([] if self.values_are_keys else [self._keys(names.v, self.value_dim, tp_rank, tp_size)]),
        )

    def _gate(self, model: ModelSpec, read: Rows, tp_rank: int, tp_size: int) -> list[FusedLinear]:
        """Return the projection of the gates, if they have one of their own."""
        if model.attention_gate not in ("elements", "heads"):
            return []
        by_head = model.attention_gate == "heads"
        num = self.num_heads * (1 if by_head else self.value_dim)
        rows = divided(model.names.attention_gate, num, tp_rank, tp_size)
        return [FusedLinear("gate_XD", (rows,), read, adapted="attention_gate", is_plain=by_head)]

    def _keys(self, name: str, size: int, tp_rank: int, tp_size: int) -> Rows:
        """Return the rows of heads with `size` rows each."""
        # with more ranks than key-value heads, neighboring ranks hold the same head
        start, num = tp_rank * self.num_kv_heads // tp_size, max(1, self.num_kv_heads // tp_size)
        return Rows(name, self.num_kv_heads * size, start * size, num * size)

    def _results(self, tp_rank: int, tp_size: int) -> Rows:
        """Return the results of attention, which the output projection reads."""
        return divided("", self.num_heads * self.value_dim, tp_rank, tp_size)


def _of_heads(field: str, heads: Rows, head_dim: int) -> PartTensor:
    """Return the norms of heads: rows of a tensor, or tensors of their own, in whose names `{}` is a head's number."""
    if "{}" not in heads.name:
        return PartTensor(field, (heads,), (ROWS, head_dim))
    own = range(heads.start, heads.start + heads.num)
    return PartTensor(field, tuple(whole(heads.name.format(head), head_dim) for head in own))


class ChunkedHeads(AttentionHeads, frozen=True):
    """That of a model whose windows are chunks: see `Parts.windows_are_chunks`."""

    # each step has other chunks
    refused: ClassVar[Mapping[Refusable, str]] = dict.fromkeys(
        ("draft_model", "graphs", "roofline"), "has layers whose attention is within chunks"
    )


class GroupedHeads(AttentionHeads, frozen=True):
    """That of a model with `Parts.qkv_by_group`. Ranks divide key-value heads, each with its query heads."""

    computed_by: ClassVar[str] = "raycore.decoder.grouped_mixer.GroupedMixer"

    @property
    def split_sizes(self) -> dict[str, int]:
        return {self.kv_heads_key: self.num_kv_heads}

    def _qkv(self, model: ModelSpec, tp_rank: int, tp_size: int) -> tuple[Rows, ...]:
        assert model.names.qkv is not None, "the rows are those of one tensor"
        num_heads = self.num_heads + 2 * self.num_kv_heads
        return (divided(model.names.qkv, num_heads * self.head_dim, tp_rank, tp_size),)


class DifferingHeads(AttentionHeads, frozen=True):
    """That of some layers of a model in which others have other heads."""

    refused: ClassVar[Mapping[Refusable, str]] = {"draft_model": _WHY, "roofline": _WHY}


class DifferingCaches(DifferingHeads, frozen=True):
    """The same, where layers keep different keys and values."""

    # blocks of layers that keep less have other ids, which are made anew in every step
    refused: ClassVar[Mapping[Refusable, str]] = {**DifferingHeads.refused, "graphs": _WHY}


def heads_of(model: ModelSpec) -> list[AttentionHeads]:
    """Return attention by layer. Layers with the same heads have the same object."""
    if not model.layer_heads:
        other = GroupedHeads if model.qkv_by_group else AttentionHeads
        kind = ChunkedHeads if model.windows_are_chunks else other
        return [_heads(model, LayerHeads(), kind)] * max(1, model.num_layers)
    sizes = {own: _sizes(_heads(model, own, AttentionHeads)) for own in model.layer_heads}
    if len(set(sizes.values())) == 1:
        kind = AttentionHeads
    elif len({(num_kv_heads, head_dim) for _, num_kv_heads, head_dim, *_ in sizes.values()}) == 1:
        kind = DifferingHeads
    else:
        kind = DifferingCaches
    made = {of_heads: _heads(model, own, kind) for own, of_heads in sizes.items()}
    return [made[sizes[own]] for own in model.layer_heads]


def _sizes(heads: AttentionHeads) -> tuple[int, int, int, int, bool, bool]:
    sizes = heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.value_dim
    return *sizes, heads.sinks, heads.values_are_keys


def _heads(model: ModelSpec, own: LayerHeads, kind: type[AttentionHeads]) -> AttentionHeads:
    head_dim = model.head_dim if own.head_dim is None else own.head_dim
    value_dim = model.value_dim if own.value_dim is None else own.value_dim
    return kind(
        num_heads=model.num_heads if own.num_heads is None else own.num_heads,
        num_kv_heads=model.num_kv_heads if own.num_kv_heads is None else own.num_kv_heads,
        head_dim=head_dim,
        value_dim=head_dim if value_dim is None else value_dim,
        sinks=model.sinks if own.sinks is None else own.sinks,
        heads_key=own.heads_key,
        kv_heads_key=own.kv_heads_key,
        values_are_keys=own.values_are_keys,
    )
