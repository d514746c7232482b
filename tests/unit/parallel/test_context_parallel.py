"""Workers that have other tokens' keys and values, as threads of this process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch.distributed import HashStore, PrefixStore
from waiting import LONG_S

from raycore.parallel.collectives import SharedMemoryCollectives
from raycore.parallel.context_parallel import ContextParallel

NUM_TOKENS, WIDTH = 3, 2


def on_every_worker(num_copies: int, num_query_parts: int, use):
    """`num_copies` groups of workers that compute the same, each with `num_query_parts` workers with other queries."""
    store, size = HashStore(), num_copies * num_query_parts

    def run(rank: int):
        copy, query_rank = divmod(rank, num_query_parts)
        every = SharedMemoryCollectives.join(PrefixStore("all", store), rank, size, timeout_s=LONG_S)
        others = None
        if num_query_parts > 1:
            others = SharedMemoryCollectives.join(PrefixStore(f"{copy}", store), query_rank, num_query_parts, 20)
        return use(ContextParallel(rank, size, every, query_rank, num_query_parts, others), rank, query_rank)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def test_each_worker_gets_all_queries_and_all_parts_of_its_own_heads():
    def use(context, rank, query_rank):
        q_TX = context.gather_queries(torch.full((NUM_TOKENS, 2 * WIDTH), float(query_rank))[:, :WIDTH])
        # what a worker computes says who computed it, and for whose heads
        parts_PTX = context.exchange_parts(q_TX * 10 + rank)
        return q_TX, parts_PTX

    for rank, (q_TX, parts_PTX) in enumerate(on_every_worker(2, 3, use)):
        assert q_TX.tolist() == [[0.0] * WIDTH + [1.0] * WIDTH + [2.0] * WIDTH] * NUM_TOKENS
        assert parts_PTX.tolist() == [[[rank % 3 * 10.0 + part] * WIDTH] * NUM_TOKENS for part in range(6)]
        assert parts_PTX.is_contiguous()


def test_workers_with_the_same_queries_exchange_only_parts():
    def use(context, rank, query_rank):
        x_TX = torch.full((NUM_TOKENS, WIDTH), float(rank))
        return context.gather_queries(x_TX), context.exchange_parts(x_TX)

    for rank, (q_TX, parts_PTX) in enumerate(on_every_worker(2, 1, use)):
        assert (q_TX == rank).all()
        assert parts_PTX.tolist() == [[[part] * WIDTH] * NUM_TOKENS for part in (0.0, 1.0)]
