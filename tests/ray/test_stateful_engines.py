"""Engines of models whose layers keep states: ranks that share experts, change in number, sleep, are killed."""

from __future__ import annotations

import random
import signal
from typing import Any

import pytest
from families import NUM_NEW_TOKENS, prompts
from faults import signal_in_step

from raycore import LLM, SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "max_num_seqs": 8,
    "block_size": 8,
    "mamba_block_size": 16,
    "num_gpu_blocks_override": 200,
    "max_num_batched_tokens": 24,
    "standby_delay_s": None,
}


def tokens(llm: LLM, ids: list[list[int]]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(ids, PARAMS, use_tqdm=False)]


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("qwen3_next", {"tensor_parallel_size": 2}),
        ("qwen3_next", {"pipeline_parallel_size": 2}),
        ("minimax", {"tensor_parallel_size": 2}),
        ("jamba", {"tensor_parallel_size": 2}),
    ],
    ids=["tensor parallel", "stages", "lightning attention", "Mamba-1"],
)
def test_ranks_that_share_experts_come_and_go(ray_cluster, checkpoints, family, shape) -> None:
    path, expected = checkpoints[family]
    rng = random.Random(0)
    with LLM(str(path), data_parallel_size=1, enable_expert_parallel=True, **shape, **OPTIONS) as llm:
        for num_ranks in (1, 2, 1):
            llm.scale(num_ranks)
            assert tokens(llm, prompts()) == expected
            for _ in range(5):
                chosen = rng.sample(range(len(expected)), rng.randrange(1, 4))
                assert tokens(llm, [prompts()[i] for i in chosen]) == [expected[i] for i in chosen]


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "jamba"])
def test_states_are_lost_in_a_sleep_and_with_a_rank_and_computed_again(ray_cluster, checkpoints, family) -> None:
    path, expected = checkpoints[family]
    with LLM(str(path), **OPTIONS) as llm:
        assert tokens(llm, prompts()) == expected
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert tokens(llm, prompts()) == expected
        signal_in_step(llm, 0, llm.engine_infos[0].pid, 5, signal.SIGKILL)
        for _ in range(2):
            assert tokens(llm, prompts()) == expected
