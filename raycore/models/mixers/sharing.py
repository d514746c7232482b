"""Attention whose values are normalized, and which may read the keys and values of an earlier layer. Does not import
torch.

A layer that reads those of another one, its *source*, has neither projections for them nor memory in blocks.
"""

from __future__ import annotations

__all__ = ["SharingHeads", "sharing_by_layer"]

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import msgspec

from raycore.models.layer_part import PartTensor, Refusable
from raycore.models.mixers.attention import AttentionHeads
from raycore.models.mixers.spec import NOTHING_CACHED, Cached
from raycore.models.rows import Rows, divided

if TYPE_CHECKING:
    from raycore.models.spec import ModelSpec

_SHARED = "has layers that read the keys and values of others"


class SharingHeads(AttentionHeads, frozen=True, kw_only=True):
    """Attention with norms of queries, keys and values. Those of values have no weights."""

    attention: AttentionHeads
    """That of the model's layer, which computes scores and results."""
    source: int | None = None
    """The layer of the model whose keys and values it reads. None: its own."""
    is_source: bool = False
    """Whether other layers read its keys and values."""

    computed_by: ClassVar[str] = "raycore.decoder.sharing_mixer.SharingMixer"
    memory: ClassVar[str] = "raycore.attention.memory.SharingMemory"
    refused_sharing: ClassVar[Mapping[Refusable, str]] = dict.fromkeys(
        ("kv_transfer", "draft_model", "roofline"), _SHARED
    )

    def why_not(self, asked: Refusable) -> str | None:
        own = None if self.source is None else self.refused_sharing.get(asked)
        return own or self.attention.why_not(asked)

    @property
    def unused(self) -> Mapping[str, str]:
        why = "a layer that reads the keys and values of another one makes none"
        return {r"self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*": why} if self.source is not None else {}

    def kept_by(self, layer: int) -> int:
        return layer if self.source is None else self.source

    def cached(self, model: ModelSpec, layer: int) -> Cached:
        return super().cached(model, layer) if self.source is None else NOTHING_CACHED

    def _norms(self, model: ModelSpec, tp_rank: int, tp_size: int) -> list[PartTensor]:
        norms = super()._norms(model, tp_rank, tp_size)
        return norms if self.source is None else norms[:1]

    def _qkv(self, model: ModelSpec, tp_rank: int, tp_size: int) -> tuple[Rows, ...]:
        if self.source is None:
            return super()._qkv(model, tp_rank, tp_size)
        return (divided(model.names.q, self.num_heads * self.query_rows(model), tp_rank, tp_size),)


def sharing_by_layer(model: ModelSpec) -> list[SharingHeads]:
    """Return attention by layer of a model that normalizes values. Layers that are alike have the same object."""
    alone = [None] * model.num_layers
    sources = [own.source for own in model.layer_heads] or alone
    made: dict[tuple[int, int | None, bool], SharingHeads] = {}
    found: list[SharingHeads] = []
    for layer, (attention, source) in enumerate(zip(model.attention_by_layer, sources, strict=False)):
        assert isinstance(attention, AttentionHeads), "latents have no values"
        key = id(attention), source, layer in sources
        if key not in made:
            made[key] = SharingHeads(
                **msgspec.structs.asdict(attention), attention=attention, source=source, is_source=layer in sources
            )
        found.append(made[key])
    return found
