"""What a worker's parts take, and what is left for the KV cache."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from test_worker import ALONE, MOE, SHAPE

from raycore.config import resolve
from raycore.errors import InvalidConfig
from raycore.parts.adapters.weights import largest_lora_bytes
from raycore.parts.drafts.worker import NO_DRAFTING
from raycore.worker.memory_sizes import MemorySizes
from raycore.worker.setup import set_up

BLOCK = 2 * 2 * 2 * 16 * 8 * 4
"""Keys and values, two layers, two heads, 16 tokens, 8 elements of 4 bytes."""
STEP = 1000


@pytest.fixture(autouse=True)
def known_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raycore.worker.memory_sizes.step_bytes", lambda *_, **__: STEP)


def make(path: Path, drafting: Any = NO_DRAFTING, shape: dict[str, Any] = SHAPE, **options: Any) -> MemorySizes:
    (path / "config.json").write_text(json.dumps(shape))
    config = resolve(str(path), num_threads=1, load_format="dummy", **options)
    rank = msgspec.structs.replace(ALONE, num_local_workers=2)
    return MemorySizes(set_up(config, rank.with_experts(config.parallel, "tcp://nowhere:1")), drafting)


def drafting_with(**sizes: int) -> Any:
    return SimpleNamespace(**{name: lambda *_, size=size: size for name, size in sizes.items()})


def test_sizes_of_blocks_and_steps_include_the_drafter(tmp_path: Path) -> None:
    alone = make(tmp_path)
    assert (alone.block, alone.step, alone.adapters) == (BLOCK, STEP, 0)
    drafting = make(tmp_path, drafting_with(bytes_per_block=5, kept_bytes=7, step_bytes=STEP + 1))
    assert (drafting.block, drafting.step) == (BLOCK + 5, 7 + STEP + 1)
    assert make(tmp_path, drafting_with(bytes_per_block=5, kept_bytes=7, step_bytes=1)).step == 7 + STEP


def test_the_size_of_adapters_includes_one_more_for_a_replacement(tmp_path: Path) -> None:
    sizes = make(tmp_path, enable_lora=True, max_loras=2, max_lora_rank=8)
    assert sizes.adapters == 3 * largest_lora_bytes(sizes.setup.share, 8)


def test_a_cpu_cache_is_a_share_of_the_memory_left_by_steps_and_other_workers(tmp_path: Path) -> None:
    sizes = make(tmp_path, gpu_memory_utilization=0.5)
    assert sizes.cache_on_cpu(2 * (STEP + 40_000)) == 10_000
    assert sizes.cache_on_cpu(1 << 50) == 4 << 30
    enough = 2 * (STEP + 4 * BLOCK)
    assert sizes.cache_on_cpu(enough) == BLOCK
    with pytest.raises(InvalidConfig, match=r"kv_cache_memory_bytes.*max_num_batched_tokens=2048"):
        sizes.cache_on_cpu(enough - 8)


def test_a_gpu_cache_is_the_memory_left_by_the_measured_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = make(tmp_path, gpu_memory_utilization=1.0)
    events: list[str] = []
    fakes = {
        "memory_allocated": lambda device: events.append("weights") or 1_000,
        "reset_peak_memory_stats": lambda device: events.append("reset"),
        "max_memory_allocated": lambda device: events.append("peak") or 3_000,
        "empty_cache": lambda: events.append("empty"),
        "mem_get_info": lambda device: (90_000, 100_000),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    # CUDA itself takes what neither the weights nor anybody else does
    assert sizes.cache_on_gpu(lambda: events.append("steps")) == 100_000 - 1_000 - 2_000 - 9_000
    assert events == ["weights", "reset", "steps", "peak", "empty"]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 100_000))
    with pytest.raises(InvalidConfig, match=r"not enough memory for the KV cache.*\n.*gpu_memory_utilization"):
        sizes.cache_on_gpu(lambda: None)


def test_a_regrouping_needs_memory_for_the_experts_that_a_worker_gains(tmp_path: Path) -> None:
    sizes = make(tmp_path, shape=SHAPE | MOE, data_parallel_size=2, enable_expert_parallel=True)
    moe = sizes.setup.config.model.spec.moe
    assert moe is not None
    expert = 4 * 3 * 16 * moe.intermediate_size * sum(moe.sparse_layers)
    assert sizes.more_for(2, num_blocks=4) == 0
    num_gained = moe.num_experts - moe.num_experts // 2
    assert sizes.more_for(1, num_blocks=4) == num_gained * expert
    setup = replace(sizes.setup, rank=msgspec.structs.replace(sizes.setup.rank, is_new=True))
    new = MemorySizes(setup, drafting_with(bytes_per_block=5, kept_bytes=7, step_bytes=1, weight_bytes=11))
    everything = sizes.weights + num_gained * expert + STEP + 7 + 4 * (BLOCK + 5) + 11
    assert new.more_for(1, num_blocks=4) == everything
