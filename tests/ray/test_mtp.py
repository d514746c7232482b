"""Workers that share a model draft with its own layer together, and go on with the drafts of the last stage."""

from __future__ import annotations

from typing import Any

import pytest
from families import NUM_NEW_TOKENS, prompts, reference
from faults import signal_in_step
from mtp_checkpoints import MtpCheckpoint

from raycore import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
ALWAYS = {"method": "mtp", "num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [(1, 8, 3)]}
TENSOR = {"tensor_parallel_size": 2}
STAGES = {"pipeline_parallel_size": 2, "async_scheduling": True}
RANKS = {"data_parallel_size": 2, "enable_expert_parallel": True}
CASES = [
    ("glm4_moe", TENSOR),
    ("glm4_moe", STAGES),
    ("glm4_moe", RANKS),
    ("glm4_moe", TENSOR | {"enable_expert_parallel": True, "async_scheduling": True}),
    ("glm4_moe", {"prefill_context_parallel_size": 2}),
    ("deepseek_v3", TENSOR | {"async_scheduling": True}),
    ("deepseek_v3", STAGES),
    ("deepseek_v3", TENSOR | {"decode_context_parallel_size": 2}),
    ("mimo_v2_flash", TENSOR | {"async_scheduling": True}),
    ("qwen3_next", TENSOR),
    ("qwen3_next", STAGES),
]


@pytest.mark.parametrize(("family", "options"), CASES, ids=[f"{family}, {'-'.join(each)}" for family, each in CASES])
def test_all_ways_of_sharing_a_model_keep_the_reference_tokens(
    ray_cluster, tmp_path, family: str, options: dict[str, Any]
) -> None:
    path = MtpCheckpoint(family, tmp_path).path
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "block_size": 8, "num_gpu_blocks_override": 40}
    expected = reference(path)
    with LLM(path, dtype="float32", num_threads=1, speculative_config=ALWAYS, **sizes, **options) as llm:
        for _ in range(2):  # the second time from cached prefixes
            assert tokens_of(llm) == expected
        assert sum(counts.num_draft_tokens for counts in llm.read_metrics().counts.values()) > 50
        signal_in_step(llm, 0, llm.engine_infos[0].worker_pids[-1], 5)
        assert tokens_of(llm) == expected


def tokens_of(llm: LLM) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": each} for each in prompts()], GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]
