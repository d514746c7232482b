"""Where a token's keys and values lie, written and gathered."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_model import CPU

from raycore.attention.kv_tensors import KVTensors
from raycore.errors import InvalidConfig


def make(num_blocks: int = 6) -> KVTensors:
    return KVTensors(2, num_blocks, num_kv_heads=2, block_size=4, head_dim=3, dtype=torch.float32, device=CPU)


def test_written_keys_and_values_are_gathered_by_head() -> None:
    kv = make()
    block_ids, positions = np.array([5, 5, 0]), np.array([2, 3, 4])
    written_TNH = torch.arange(3 * 4 * 3, dtype=torch.float32).view(3, 4, 3) + 1
    rows = torch.from_numpy(kv.write_rows(block_ids, positions))
    kv.rows[1].index_copy_(0, rows, written_TNH.view(-1, 3))
    gathered = kv.blocks[1].index_select(0, torch.from_numpy(kv.gather_rows(np.array([[5, 0]])))).view(2, 1, 2, 8, 3)
    for is_value in (0, 1):
        for head in (0, 1):
            expected = written_TNH[:, is_value * 2 + head]
            torch.testing.assert_close(gathered[is_value, 0, head, 2:5], expected)
    assert int((gathered != 0).sum()) == written_TNH.numel()
    assert not kv.blocks[0].any()


def test_a_cache_takes_no_memory_until_it_is_written() -> None:
    kv = make(num_blocks=1 << 22)
    assert kv.rows[1].numel() * 4 * 2 == (1 << 22) * KVTensors.bytes_per_block(2, 2, 4, 3, torch.float32)
    assert not kv.rows[1][-1].any()


def test_an_int8_cache_has_a_scale_for_each_token_and_head() -> None:
    kv = KVTensors(2, 5, num_kv_heads=3, block_size=16, head_dim=64, dtype=torch.int8, device=CPU)
    size = KVTensors.bytes_per_block(2, 3, 16, 64, torch.int8)
    assert sum(blocks.nbytes for blocks in kv.blocks) == 5 * size
    in_float32 = KVTensors.bytes_per_block(2, 3, 16, 64, torch.float32)
    assert size == in_float32 / 4 + 2 * 2 * 3 * 16 * 4


def test_a_cache_that_cannot_be_allocated_names_the_options_to_lower() -> None:
    with pytest.raises(InvalidConfig, match="lower num_gpu_blocks_override or kv_cache_memory_bytes"):
        make(num_blocks=1 << 50)
