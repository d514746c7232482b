"""Engines whose layers have heads as large as Gemma 4's."""

from __future__ import annotations

from pathlib import Path

from equality import generate
from families import make_checkpoint, prompts, reference
from native_kernels import needs_kernels

from raycore.config import resolve
from raycore.engine.core import EngineCore
from raycore.executor.inline import InlineExecutor
from raycore.worker.rank import RankIdentity


@needs_kernels
def test_native_kernels_compute_heads_as_large_as_gemma_4s(tmp_path: Path) -> None:
    path = make_checkpoint("gemma4", tmp_path, head_dim=256, global_head_dim=512)
    config = resolve(
        path, dtype="float32", attention_backend="native", max_num_seqs=4, max_num_batched_tokens=24, num_threads=1
    )
    executor = InlineExecutor(config, RankIdentity(0, 1))
    try:
        assert generate(EngineCore(config, executor), prompts()) == reference(path)
    finally:
        executor.shutdown()
