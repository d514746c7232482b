"""Latent attention to selected tokens, as config.json describes it.

An *indexer* has heads of its own, and one key of each token, which the cache keeps beside the token's latent. The score
of a token is a weighted sum of what is above 0 in the products of the indexer's queries with its key. A query sees the
tokens with the highest scores. Source: DeepSeek-V3.2-Exp's report, section 2.1. Does not import torch.
"""

from __future__ import annotations

__all__ = ["Indexer", "SelectingHeads", "parse_indexer", "selecting_heads"]

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import msgspec

from raycore.json_fields import JsonFields
from raycore.models.layer_part import PartTensor, Refusable
from raycore.models.linears import FusedLinear
from raycore.models.mixers.latent import LatentHeads
from raycore.models.mixers.spec import HeadShape, IndexShape
from raycore.models.rows import whole

if TYPE_CHECKING:
    from raycore.models.spec import ModelSpec

_WHY = "has attention to selected tokens"


class Indexer(msgspec.Struct, frozen=True, tag=True):
    """What selects the tokens that a query sees. Every rank has all of it."""

    num_heads: int
    head_dim: int
    """Number of elements of its queries and of its keys. The first ones are rotated, as many as of latent attention's
    keys."""
    num_selected: int
    """How many tokens a query sees, if there are so many."""
    is_adjacent: bool
    """Whether rotated pairs are adjacent. Otherwise, the halves of what is rotated are."""
    shared: list[bool] = []
    """By layer: whether it has no indexer, and sees the tokens that the layer before it sees. Empty: all have one."""


class SelectingHeads(LatentHeads, frozen=True, kw_only=True):
    """The sizes of latent attention to selected tokens, in layers that have an indexer, or in those that don't."""

    indexer: Indexer
    is_shared: bool = False
    """Whether the layer has no indexer: see `Indexer.shared`."""

    computed_by: ClassVar[str] = "raycore.decoder.selecting_mixer.SelectingMixer"
    weights_class: ClassVar[str] = "raycore.decoder.selecting_mixer.SelectingWeights"
    memory: ClassVar[str] = "raycore.attention.latent_memory.SelectingMemory"
    by_torch: ClassVar[str] = "selection of tokens"
    depends_on_threads: ClassVar[bool] = True
    refused: ClassVar[Mapping[Refusable, str]] = {
        **LatentHeads.refused,
        "draft_model": _WHY,
        "context_parallel": _WHY,
    }

    @property
    def unused(self) -> Mapping[str, str]:
        why = "a layer that sees the tokens that the layer before it has selected needs no indexer"
        return {rf"{self.block}\.indexer\..*": why} if self.is_shared else {}

    @property
    def kind(self) -> int:
        return id(self.indexer)

    @property
    def needs_layer_before(self) -> bool:
        return self.is_shared

    def linears(
        self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1, num_inputs: int | None = None
    ) -> tuple[FusedLinear, ...]:
        own = super().linears(model, tp_rank, tp_size, num_inputs)
        if self.is_shared:
            return own
        indexer, name = self.indexer, f"{self.block}.indexer"
        assert self.query_rank is not None, "config.json is checked"
        queries = whole(f"{name}.wq_b", indexer.num_heads * indexer.head_dim)
        of_token = whole(f"{name}.wk", indexer.head_dim), whole(f"{name}.weights_proj", indexer.num_heads)
        read = whole("", num_inputs or model.hidden_size)
        return (
            *own,
            FusedLinear("index_q_XQ", (queries,), whole("", self.query_rank), adapted="index_q", is_plain=True),
            FusedLinear("index_inputs_XD", of_token, read, adapted="index_inputs", is_plain=True),
        )

    def vectors(self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1) -> tuple[PartTensor, ...]:
        own = super().vectors(model, tp_rank, tp_size)
        if self.is_shared:
            return own
        name, size = f"{self.block}.indexer.k_norm", self.indexer.head_dim
        fields = {"weight": "index_norm_K", "bias": "index_norm_bias_K"}
        return *own, *(PartTensor(field, (whole(f"{name}.{each}", size),)) for each, field in fields.items())

    def heads(self, model: ModelSpec, tp_size: int) -> HeadShape:
        indexer = self.indexer
        assert self.query_rank is not None, "config.json is checked"
        shape = IndexShape(
            indexer.num_heads,
            indexer.head_dim,
            indexer.num_selected,
            is_adjacent=indexer.is_adjacent,
            num_rotated=self.rotated_dim,
            query_rank=self.query_rank,
        )
        return HeadShape(model.num_heads // tp_size, 1, self.width, self.rank, shape)

    def cached_beside(self, model: ModelSpec) -> int:
        return 0 if self.is_shared else self.indexer.head_dim

    def cached_numbers(self, model: ModelSpec, tp_size: int) -> int:
        return self.width + self.cached_beside(model)


def selecting_heads(model: ModelSpec, latent: LatentHeads, indexer: Indexer) -> list[SelectingHeads]:
    """Return the attention of each layer, or that of a model without layers. Layers of a kind have the same object."""
    made = {
        is_shared: SelectingHeads(**msgspec.structs.asdict(latent), indexer=indexer, is_shared=is_shared)
        for is_shared in (False, True)
    }
    return [made[is_shared] for is_shared in indexer.shared or [False] * max(1, model.num_layers)]


def parse_indexer(config: JsonFields, *, is_adjacent: bool, shared: list[bool] | None = None) -> Indexer:
    """Return the indexer in config.json. The arguments are attributes of `Indexer`.

    Raises:
        InvalidCheckpoint: a size is missing or doesn't fit the others.
    """
    if config.optional_int("q_lora_rank") is None:
        raise config.error("q_lora_rank", "a number: the indexer's queries are made of vectors of this size")
    head_dim, num_rotated = config.int_("index_head_dim"), config.int_("qk_rope_head_dim")
    if head_dim < num_rotated:
        raise config.error("index_head_dim", f"at least qk_rope_head_dim={num_rotated}")
    return Indexer(config.int_("index_n_heads"), head_dim, config.int_("index_topk"), is_adjacent, shared or [])
