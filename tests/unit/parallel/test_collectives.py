"""Ranks that add up and gather, as threads of this process: over shared memory, and by torch."""

from __future__ import annotations

import datetime
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore, PrefixStore
from waiting import LONG_S

from raycore.parallel import collectives, peer_memory
from raycore.parallel.collectives import SharedMemoryCollectives

SIZE = 3


def on_every_rank(work):
    store = HashStore()

    def run(rank: int):
        return work(SharedMemoryCollectives.join(store, rank, SIZE, timeout_s=LONG_S), rank)

    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(run, range(SIZE)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_ranks_get_the_same_sums_and_parts(monkeypatch, dtype):
    # so small that tensors go in pieces
    monkeypatch.setattr(collectives, "CAPACITY_BYTES", 64)
    inputs = [torch.randn(5, 13).to(dtype) for _ in range(SIZE)]
    expected = torch.stack([x.float() for x in inputs]).sum(0).to(dtype)

    def work(group, rank):
        # many in a row: a rank that overwrote what another has yet to read would show
        sums = [group.all_reduce_(inputs[rank].clone() * (i + 1)) for i in range(50)]
        return sums, group.all_gather(inputs[rank][:, ::2])

    results = on_every_rank(work)
    for sums, parts in results:
        torch.testing.assert_close(sums[0], expected)
        assert all(torch.equal(mine, others) for mine, others in zip(sums, results[0][0], strict=True))
        assert all(torch.equal(part, x[:, ::2]) for part, x in zip(parts, inputs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_rank_gets_its_columns_of_all_ranks(monkeypatch, dtype):
    monkeypatch.setattr(collectives, "CAPACITY_BYTES", 64)
    inputs = [torch.randn(7, 2 * SIZE).to(dtype) for _ in range(SIZE)]

    def work(group, rank):
        return [group.gather_columns(inputs[rank], slice(2 * rank, 2 * rank + 2)) for _ in range(50)]

    for rank, found in enumerate(on_every_rank(work)):
        expected = torch.stack(inputs)[:, :, 2 * rank : 2 * rank + 2]
        assert all(torch.equal(each, expected) for each in found)


def test_a_rank_that_does_not_join_the_collectives_is_named(monkeypatch):
    def work(group, rank):
        group._timeout_s = 0.05
        if rank != 1:
            with pytest.raises(TimeoutError, match=r"ranks \[1\]"):
                group.all_reduce_(torch.ones(1))

    on_every_rank(work)


def test_all_ranks_get_no_group_if_one_cannot_share_memory(monkeypatch):
    monkeypatch.setattr(peer_memory, "_open", lambda store, num_bytes: None)
    assert on_every_rank(lambda group, rank: group) == [None] * SIZE


def test_a_process_may_be_in_several_groups():
    """Without shared memory, as between nodes: each of these threads is in two groups of Gloo's."""
    store = HashStore()
    timeout = datetime.timedelta(seconds=20)

    def run(rank: int):
        groups = [
            collectives.TorchCollectives(PrefixStore(name, store), rank, 2, torch.device("cpu"), timeout)
            for name in ("first", "second")
        ]
        made = [group.all_reduce_(torch.full((3,), rank + 1.0)).tolist() for group in groups]
        made += [torch.cat(group.all_gather(torch.full((1, 2), rank))).tolist() for group in groups]
        made += [group.gather_columns(torch.tensor([[rank, rank + 2]]), slice(1, 2)).tolist() for group in groups]
        for group in groups:
            group.close()
            group.close()
        return made

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2))) == [[[3.0] * 3] * 2 + [[[0, 0], [1, 1]]] * 2 + [[[[2]], [[3]]]] * 2] * 2
