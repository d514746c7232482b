"""Attention to selected blocks of tokens, as config.json describes it.

A sequence is divided into blocks of tokens. An *indexer* has a query for each key-value head, and one key of each
token, which the cache keeps beside the token's keys and values. The score of a block is the highest product of the
query with its keys. The queries of the same head see the blocks with the highest scores, and the last ones. Source:
MiniMax-M3, as transformers computes it. Does not import torch.
"""

from __future__ import annotations

__all__ = ["BlockIndexer", "BlockSelectingHeads", "block_selecting_heads", "parse_block_indexer"]

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import msgspec

from raycore.json_fields import JsonFields
from raycore.models.layer_part import PartTensor, Refusable
from raycore.models.linears import FusedLinear
from raycore.models.mixers.attention import AttentionHeads
from raycore.models.mixers.spec import HeadShape, IndexShape
from raycore.models.rows import whole

if TYPE_CHECKING:
    from raycore.models.spec import ModelSpec

_WHY = "has attention to selected blocks of tokens"


class BlockIndexer(msgspec.Struct, frozen=True, tag=True):
    """What selects the blocks that a query sees. Ranks divide its queries as key-value heads."""

    head_dim: int
    """Number of elements of its queries and of its keys. As many are rotated as of a head."""
    block_size: int
    """In tokens."""
    num_selected: int
    """How many blocks a query sees, if there are so many."""
    num_local: int
    """How many of these are the last ones."""
    layers: list[bool]
    """Which layers have an indexer. The others see all tokens."""


class BlockSelectingHeads(AttentionHeads, frozen=True, kw_only=True):
    """Attention to selected blocks. Sizes are those of the whole model."""

    indexer: BlockIndexer

    computed_by: ClassVar[str] = "raycore.decoder.block_selecting_mixer.BlockSelectingMixer"
    weights_class: ClassVar[str] = "raycore.decoder.block_selecting_mixer.BlockSelectingWeights"
    memory: ClassVar[str] = "raycore.attention.block_selection.BlockSelectingMemory"
    by_torch: ClassVar[str] = "selection of blocks"
    depends_on_threads: ClassVar[bool] = True
    refused: ClassVar[Mapping[Refusable, str]] = dict.fromkeys(
        ("draft_model", "context_parallel", "graphs", "roofline"), _WHY
    )

    def renamed(self, model: ModelSpec) -> Mapping[str, str]:
        names = {f"self_attn.indexer.{each}_proj": f"self_attn.index_{each}_proj" for each in "qk"}
        return {**super().renamed(model), **names}

    def linears(
        self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1, num_inputs: int | None = None
    ) -> tuple[FusedLinear, ...]:
        size = self.indexer.head_dim
        queries = self._keys("self_attn.index_q_proj", size, tp_rank, tp_size)
        outputs = queries, whole("self_attn.index_k_proj", size)
        read = whole("", num_inputs or model.hidden_size)
        own = FusedLinear("index_XD", outputs, read, adapted="index", is_plain=True)
        return *super().linears(model, tp_rank, tp_size, num_inputs), own

    def vectors(self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1) -> tuple[PartTensor, ...]:
        size = self.indexer.head_dim
        own = (
            PartTensor(f"index_{each}_norm_K", (whole(f"self_attn.index_{each}_norm.weight", size),)) for each in "qk"
        )
        return *super().vectors(model, tp_rank, tp_size), *own

    def heads(self, model: ModelSpec, tp_size: int) -> HeadShape:
        shape, indexer, rotation = super().heads(model, tp_size), self.indexer, model.rotations[0]
        index = IndexShape(
            shape.num_kv_heads,
            indexer.head_dim,
            indexer.num_selected,
            is_adjacent=rotation is None or rotation.is_adjacent,
            num_rotated=0 if rotation is None else rotation.num_components(self.head_dim),
            block_size=indexer.block_size,
            num_local=indexer.num_local,
        )
        return replace(shape, index=index)

    def cached_beside(self, model: ModelSpec) -> int:
        return self.indexer.head_dim

    def cached_numbers(self, model: ModelSpec, tp_size: int) -> int:
        return super().cached_numbers(model, tp_size) + self.indexer.head_dim


def block_selecting_heads(heads: Sequence[AttentionHeads], indexer: BlockIndexer) -> list[AttentionHeads]:
    """Return the attention of each layer. `heads`: by layer, which would see all tokens, all the same object."""
    own = BlockSelectingHeads(**msgspec.structs.asdict(heads[0]), indexer=indexer)
    return [own if selects else each for selects, each in zip(indexer.layers, heads, strict=True)]


def parse_block_indexer(config: JsonFields, layers: list[bool], num_rotated: int) -> BlockIndexer | None:
    """Return the indexer in config.json. None: no layer has one.

    Args:
        layers: which layers have one.
        num_rotated: how many elements of a head are rotated.

    Raises:
        InvalidCheckpoint: a size is missing or doesn't fit the others.
    """
    if not any(layers):
        return None
    head_dim, num_kv_heads = config.int_("index_head_dim"), config.int_("num_key_value_heads")
    num_selected, num_local = config.int_("index_topk_blocks"), config.int_("index_local_blocks", low=0)
    if config.int_("index_n_heads") != num_kv_heads:
        raise config.error("index_n_heads", f"num_key_value_heads={num_kv_heads}: each selects blocks for one of them")
    if head_dim < num_rotated:
        raise config.error("index_head_dim", f"at least the {num_rotated} elements of a head that are rotated")
    if num_local > num_selected:
        raise config.error("index_local_blocks", f"at most index_topk_blocks={num_selected}")
    return BlockIndexer(head_dim, config.int_("index_block_size"), num_selected, num_local, layers)
