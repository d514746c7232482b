"""Layers with different heads in one cache."""

from __future__ import annotations

import numpy as np
import torch
from small_model import CPU

from raycore.attention.kv_tensors import KVTensors
from raycore.attention.latent_tensors import LatentTensors
from raycore.attention.paged_cache import CachePages, bytes_per_block
from raycore.cache_layout import CachePage
from raycore.models.mixers.spec import HeadShape

NUM_BLOCKS, BLOCK_SIZE = 5, 4
FEW, MANY, WIDE = HeadShape(8, 2, 6), HeadShape(8, 4, 6), HeadShape(4, 2, 12)
HEADS = {1: FEW, 2: MANY, 4: WIDE, 5: FEW}
"""By layer. Those of layers 2 and 4 take as many bytes."""
SMALL, LARGE = (bytes_per_block(heads, 1, BLOCK_SIZE, torch.float32) for heads in (FEW, MANY))
PAGES = {1: CachePage(LARGE, 0), 2: CachePage(LARGE, 0), 4: CachePage(LARGE, 1), 5: CachePage(SMALL, 0)}
"""Layers 1 and 2 are in different groups."""


def write(pages: CachePages, layer: int, block: int) -> None:
    """Write a token's keys and values: the layer's number."""
    heads = HEADS[layer]
    cache = pages.of_layers(heads, [layer])
    assert isinstance(cache, KVTensors)
    own_block = block * pages.blocks_in_page(heads, layer)
    rows = torch.from_numpy(cache.write_rows(np.array([own_block]), np.array([3])))
    cache.rows[0].index_copy_(0, rows, torch.full((len(rows), heads.head_dim), float(layer)))


def test_layers_of_different_groups_have_different_blocks_of_the_same_memory() -> None:
    pages = CachePages(PAGES, NUM_BLOCKS, BLOCK_SIZE, torch.float32, CPU)
    assert [each.nbytes for each in pages.blocks] == [NUM_BLOCKS * size for size in (LARGE, LARGE, SMALL)]
    for layer, block in ((1, 3), (2, 2), (4, 3), (5, 4)):
        write(pages, layer, block)
    found = [page.view(NUM_BLOCKS, -1) for page in pages.blocks]
    largest = [[float(page_NX[block].max()) for block in range(NUM_BLOCKS)] for page_NX in found]
    assert largest == [[0.0, 0.0, 2.0, 1.0, 0.0], [0.0, 0.0, 0.0, 4.0, 0.0], [0.0, 0.0, 0.0, 0.0, 5.0]]
    # layer 1 uses the first half of its page
    assert found[0][3].view(2, -1).any(1).tolist() == [True, False]


def test_a_layer_has_its_own_rows_of_a_page() -> None:
    pages = CachePages(PAGES, NUM_BLOCKS, BLOCK_SIZE, torch.float32, CPU)
    assert [pages.blocks_in_page(HEADS[layer], layer) for layer in PAGES] == [2, 1, 1, 1]
    for layer, heads in HEADS.items():
        cache = pages.of_layers(heads, [layer])
        assert isinstance(cache, KVTensors)
        width = BLOCK_SIZE * heads.head_dim
        assert cache.blocks[0].shape == (NUM_BLOCKS * PAGES[layer].num_bytes // (4 * width), width)
        assert cache.rows[0].shape[1] == heads.head_dim
    both = pages.of_layers(FEW, [5, 1])
    assert [each.data_ptr() for each in both.blocks] == [pages.blocks[2].data_ptr(), pages.blocks[0].data_ptr()]


def test_what_a_layer_keeps_beside_has_a_page_of_its_own() -> None:
    latents = HeadShape(4, 1, 6, 4)
    size, beside_size = (BLOCK_SIZE * numbers * 4 for numbers in (6, 3))
    main, beside = {1: CachePage(size, 0), 2: CachePage(size, 1)}, {2: CachePage(beside_size, 0)}
    pages = CachePages(main, NUM_BLOCKS, BLOCK_SIZE, torch.float32, CPU, beside)
    assert [each.nbytes for each in pages.blocks] == [NUM_BLOCKS * each for each in (size, size, beside_size)]
    cache = pages.of_layers(latents, [2, 1])
    assert isinstance(cache, LatentTensors)
    own, none = cache.beside
    assert none is None
    assert own is not None
    assert own.shape == (NUM_BLOCKS * BLOCK_SIZE, 3)
    assert own.data_ptr() == pages.blocks[2].data_ptr()
