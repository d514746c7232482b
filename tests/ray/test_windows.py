"""Engines of models with sliding windows on several workers, stages and ranks: all have the same groups of layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from families import NUM_NEW_TOKENS, make_checkpoint, prompts, reference
from faults import signal_in_step

from raycore import LLM, SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
SHAPES: list[dict[str, Any]] = [
    {"tensor_parallel_size": 2, "data_parallel_size": 2},
    {"pipeline_parallel_size": 2, "async_scheduling": True},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    path = make_checkpoint("gemma3", tmp_path_factory.mktemp("checkpoint"))
    return path, reference(path)


@pytest.mark.parametrize("shape", SHAPES, ids=["tp2-dp2", "pp2"])
def test_all_workers_free_windows_and_a_killed_rank_changes_no_token(
    ray_cluster: Any, checkpoint: tuple[Path, list[list[int]]], shape: dict[str, Any]
) -> None:
    path, expected = checkpoint
    limits = {"max_num_seqs": 4, "block_size": 4, "max_num_batched_tokens": 24, "num_gpu_blocks_override": 50}
    with LLM(str(path), dtype="float32", num_threads=1, standby_delay_s=None, **shape, **limits) as llm:
        infos = llm.engine_infos
        layouts = [info.cache_layout for info in infos]
        assert all(layout is not None and layout.windows == [None, 17, 17] for layout in layouts)
        assert infos[0].num_kv_tokens < 50 * 4
        for _ in range(2):  # the second time finds prefixes
            assert tokens(llm) == expected
        signal_in_step(llm, infos[-1].dp_rank, infos[-1].pid, 4)
        assert tokens(llm) == expected
        assert llm.engine_infos[-1].pid != infos[-1].pid


def tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(prompts(), PARAMS, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]
