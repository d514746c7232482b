"""Attention divided over several workers, each with a share of the keys and values, as adapters of the contract.

A batch's blocks are the scheduler's: each has a block of every worker's cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from attention_contract import (
    CPU,
    Batch,
    Outcome,
    Sizes,
    native_layout,
    spec_of,
    step_of,
    usual_layout,
)
from torch import Tensor

from raycore.attention.context_share import ContextShare
from raycore.attention.divided import PartialAttention
from raycore.attention.kv_tensors import KVTensors
from raycore.attention.native import NativePartialAttention
from raycore.attention.scratch import GatherScratch
from raycore.attention.spec import AttentionSpec
from raycore.attention.torch_partial import TorchPartialAttention, max_blocks

MakePartial = Callable[[AttentionSpec, KVTensors, ContextShare, int], PartialAttention]
"""Gets the number of query heads of all workers, too."""


def torch_partial(
    longest: int, *, batch_invariant: bool = False
) -> Callable[[AttentionSpec, KVTensors, ContextShare, int], TorchPartialAttention]:
    """`longest`: maximum number of tokens of a sequence."""

    def make(spec: AttentionSpec, kv: KVTensors, share: ContextShare, num_heads: int) -> TorchPartialAttention:
        scratch = GatherScratch(kv, 2, max_blocks(longest, share))
        return TorchPartialAttention(spec, kv, share, scratch, num_heads, batch_invariant=batch_invariant)

    return make


def native_partial(spec: AttentionSpec, kv: KVTensors, share: ContextShare, num_heads: int) -> NativePartialAttention:
    return NativePartialAttention(spec, kv, share)


def divided(batch: Batch, num_workers: int, make: MakePartial, num_query_parts: int = 1) -> Outcome:
    """Attention of `num_workers` workers, of which `num_query_parts` neighbors each have some of the query heads."""
    whole, real = batch.sizes, batch.slots_T >= 0
    assert num_query_parts == 1 or whole.num_kv_heads == 1
    own = replace(whole, block_size=whole.block_size // num_workers, group=whole.group // num_query_parts)
    is_native = make is native_partial
    step, tensors = step_of(batch, real)
    tensors.ends_T = None if batch.ends_T is None else batch.ends_T[real].contiguous()
    workers, inputs = [], []
    for worker in range(num_workers):
        share = ContextShare(worker, num_workers, own.block_size)
        kv = _cache_of(batch, share, own, is_native=is_native)
        heads = _heads(whole, worker % num_query_parts, num_query_parts)
        partial = make(_spec_of(batch, own, heads), kv, share, whole.num_heads)
        partial.begin(step, tensors)
        qkv_TNH = batch.qkv_TO[real].unflatten(1, (-1, whole.head_dim))
        qkv_TO = torch.cat([qkv_TNH[:, heads], qkv_TNH[:, whole.num_heads :]], 1).flatten(1)
        partial.store(0, qkv_TO)
        workers.append((partial, kv))
        inputs.append(qkv_TO[:, : own.num_heads * own.head_dim])
    q_TX = torch.cat(inputs[:num_query_parts], 1)
    parts_PTX = torch.stack([partial.attend(0, q_TX) for partial, _ in workers])
    width = parts_PTX.shape[2] // num_query_parts
    own_parts = parts_PTX.split(width, 2)
    merged = [partial.merge(0, part.contiguous()) for (partial, _), part in zip(workers, own_parts, strict=False)]
    out_TX = torch.zeros(len(real), whole.num_heads * whole.head_dim, dtype=whole.dtype)
    out_TX[real] = torch.cat(merged, 1)
    return Outcome(out_TX, _whole_cache(batch, [kv for _, kv in workers], own, is_native=is_native))


def _heads(sizes: Sizes, part: int, num_parts: int) -> slice:
    """The query heads of a worker."""
    size = sizes.num_heads // num_parts
    return slice(part * size, (part + 1) * size)


def _spec_of(batch: Batch, own: Sizes, heads: slice) -> AttentionSpec:
    spec, num_heads = spec_of(batch, own), batch.sizes.num_heads
    norm_NH, sinks_N = batch.norm_NH, batch.sinks_N
    return replace(
        spec,
        qk_norms_NH=[None if norm_NH is None else torch.cat([norm_NH[heads], norm_NH[num_heads:]])],
        sinks_N=[None if sinks_N is None else sinks_N[heads].to(own.dtype)],
    )


def _cache_of(batch: Batch, share: ContextShare, own: Sizes, *, is_native: bool) -> KVTensors:
    whole_NKPSH = _by_worker(batch.blocks, own, share.size)
    blocks = whole_NKPSH[:, :, share.index].reshape(-1, own.block_size * own.head_dim)
    num_blocks = len(blocks) // (2 * own.num_kv_heads)
    kv = KVTensors(1, num_blocks, own.num_kv_heads, own.block_size, own.head_dim, own.dtype, CPU)
    kv.blocks[0].copy_(native_layout(blocks, own) if is_native else blocks.nan_to_num(0.0))
    return kv


def _by_worker(blocks: Tensor, own: Sizes, num_workers: int) -> Tensor:
    """The blocks as [blocks, 2 · K, workers, S, H]."""
    return blocks.view(-1, 2 * own.num_kv_heads, num_workers, own.block_size, own.head_dim)


def _whole_cache(batch: Batch, caches: list[KVTensors], own: Sizes, *, is_native: bool) -> Tensor:
    parts = [usual_layout(kv.blocks[0], own) if is_native else kv.blocks[0] for kv in caches]
    shape = -1, 2 * own.num_kv_heads, own.block_size, own.head_dim
    blocks = torch.stack([part.view(shape) for part in parts], 2).reshape(batch.blocks.shape)
    if not is_native:
        blocks[batch.blocks.isnan() & (blocks == 0)] = math.nan
    return blocks
