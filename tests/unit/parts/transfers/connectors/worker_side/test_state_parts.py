"""Blocks and parts of states of a worker as bytes: each comes back where it was, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from raycore.parts.transfers.connectors.worker_side.caches import KVCaches
from raycore.parts.transfers.connectors.worker_side.state_parts import StateParts

NUM_BLOCKS, NUM_ROWS = 5, 4
ROW_BYTES = 2 * (3 * 2 + 5 * 4)
"""Two layers, each with 3 numbers of 2 bytes and 5 of 4 bytes."""


def make_states() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    conv = torch.randn(2, NUM_ROWS, 3, 1, generator=generator).to(torch.bfloat16)
    return [conv, torch.randn(2, NUM_ROWS, 5, generator=generator)]


def make_caches(states: list[torch.Tensor], num_parts: int, block_bytes: int = ROW_BYTES) -> KVCaches:
    layers = [torch.arange(NUM_BLOCKS * block_bytes, dtype=torch.int64).to(torch.uint8)]
    return KVCaches(layers, NUM_BLOCKS, "layout", states=StateParts(states, num_parts))


def parts_of(caches: KVCaches, row: int, num_parts: int) -> list[int]:
    return [NUM_BLOCKS + row * num_parts + part for part in range(num_parts)]


@pytest.mark.parametrize("num_parts", [1, 2, 3, 7, 52])
@pytest.mark.parametrize("by_views", [False, True])
def test_a_row_moves_to_another_one_part_by_part(num_parts: int, by_views: bool) -> None:
    states = make_states()
    before = [state.clone() for state in states]
    caches = make_caches(states, num_parts)
    kept = np.zeros((num_parts, caches.block_bytes), np.uint8)
    caches.read_blocks(parts_of(caches, 1, num_parts), kept)
    if by_views:
        for block, data in zip(parts_of(caches, 3, num_parts), kept, strict=True):
            views = caches.page_views(block)
            assert sum(map(len, views)) == caches.block_bytes
            start = 0
            for view in views:
                view[:] = data[start : start + len(view)].data
                start += len(view)
    else:
        caches.write_blocks(parts_of(caches, 3, num_parts), kept)
    for state, old in zip(states, before, strict=True):
        assert torch.equal(state[:, 3], old[:, 1])
        assert torch.equal(state[:, :3], old[:, :3])


def test_a_row_is_divided_into_parts_of_about_equal_size() -> None:
    parts = StateParts(make_states(), 3)
    sizes = [sum(page.shape[1] for page in part) for part in parts.pages]
    assert sizes == [18, 18, 16]
    assert parts.part_bytes == 18


def test_blocks_are_read_beside_states() -> None:
    states = make_states()
    caches = make_caches(states, 1)
    kept = np.zeros((2, caches.block_bytes), np.uint8)
    caches.read_blocks([2, NUM_BLOCKS + 2], kept)
    assert kept[0].tolist() == caches.pages[0][2].tolist()
    expected = [state[layer, 2].contiguous().view(torch.uint8).flatten() for state in states for layer in range(2)]
    assert kept[1].tolist() == torch.cat(expected).tolist()
    caches.write_blocks([0], kept[1:])
    assert caches.pages[0][0].tolist() == kept[1].tolist()


def test_a_worker_without_such_layers_has_empty_parts() -> None:
    caches = make_caches([], 2)
    kept = np.full((1, caches.block_bytes), 7, np.uint8)
    caches.read_blocks([NUM_BLOCKS + 1], kept)
    caches.write_blocks([NUM_BLOCKS + 1], kept)
    assert (kept == 7).all()
    assert sum(map(len, caches.page_views(NUM_BLOCKS))) == caches.block_bytes
