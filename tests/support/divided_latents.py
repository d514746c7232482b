"""Latent attention divided over several workers, each with a share of the latents, as an adapter of the contract.

A batch's blocks are the scheduler's: each has a block of every worker's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from latent_contract import CPU, LatentBatch, Outcome, spec_of

from raycore.attention.context_share import ContextShare
from raycore.attention.divided import PartialAttention
from raycore.attention.latent import TorchPartialLatentAttention
from raycore.attention.latent_tensors import LatentTensors
from raycore.attention.native_latent import NativePartialLatentAttention
from raycore.attention.spec import AttentionSpec

MakePartial = Callable[[AttentionSpec, LatentTensors, ContextShare], PartialAttention]


def torch_partial(spec: AttentionSpec, kv: LatentTensors, share: ContextShare) -> TorchPartialLatentAttention:
    return TorchPartialLatentAttention(spec, kv, share)


def invariant_partial(spec: AttentionSpec, kv: LatentTensors, share: ContextShare) -> TorchPartialLatentAttention:
    return TorchPartialLatentAttention(spec, kv, share, batch_invariant=True)


def native_partial(spec: AttentionSpec, kv: LatentTensors, share: ContextShare) -> NativePartialLatentAttention:
    return NativePartialLatentAttention(spec, kv, share)


def divided_latents(batch: LatentBatch, num_workers: int, make: MakePartial) -> Outcome:
    """Attention of `num_workers` workers. If possible, each has some of the query heads. Otherwise each has all."""
    whole = batch.sizes
    num_parts = num_workers if whole.num_heads % num_workers == 0 else 1
    own = replace(whole, block_size=whole.block_size // num_workers, num_heads=whole.num_heads // num_parts)
    spec = spec_of(batch)
    spec = replace(spec, heads=replace(spec.heads, num_heads=own.num_heads))
    rows_NPSW = batch.rows_XW.view(-1, num_workers, own.block_size, own.width)
    step, tensors = batch.step()
    partials, caches, queries = [], [], []
    for worker in range(num_workers):
        kv = LatentTensors(1, len(rows_NPSW), own.width, own.block_size, own.dtype, CPU)
        kv.rows[0].copy_(rows_NPSW[:, worker].reshape(-1, own.width))
        partial = make(spec, kv, ContextShare(worker, num_workers, own.block_size))
        partial.begin(step, tensors)
        first = worker % num_parts * own.num_heads
        heads = [*range(first, first + own.num_heads), whole.num_heads]
        qkv_TO = batch.fused_TNW[:, heads].flatten(1)
        partial.store(0, qkv_TO)
        queries.append(qkv_TO[:, : own.num_heads * own.width])
        partials.append(partial)
        caches.append(kv.rows[0].view(-1, own.block_size, own.width))
    q_TX = torch.cat(queries[:num_parts], 1)
    parts_PTX = torch.stack([partial.attend(0, q_TX) for partial in partials])
    own_parts = parts_PTX.split(parts_PTX.shape[2] // num_parts, 2)
    merged = [partial.merge(0, part.contiguous()) for partial, part in zip(partials, own_parts, strict=False)]
    out_TX = torch.cat(merged, 1)
    return Outcome(out_TX.view(len(out_TX), whole.num_heads, -1), torch.stack(caches, 1).view(-1, own.width))
