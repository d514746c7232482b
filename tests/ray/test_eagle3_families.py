"""Workers that share a model of any dense family draft with an EAGLE-3 head together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from drafting_checkpoints import head_config, random_head, write_checkpoint
from families import NUM_NEW_TOKENS, SIZES, make_checkpoint, prompts, reference

from raycore import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
ALWAYS = {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [(1, 8, 3)]}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("cohere2", {"tensor_parallel_size": 2, "async_scheduling": True}),
    ("gemma2", {"tensor_parallel_size": 2}),
]


@pytest.mark.parametrize(("family", "options"), CASES, ids=[family for family, _ in CASES])
def test_eagle3_drafts_of_several_workers_change_no_token(
    ray_cluster, tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    path = make_checkpoint(family, tmp_path)
    config = head_config(SIZES["hidden_size"], SIZES["vocab_size"], eagle_aux_hidden_state_layer_ids=[0, 1])
    head = write_checkpoint(tmp_path / "head", config, random_head(config))
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "block_size": 8, "num_gpu_blocks_override": 60}
    settings = {"model": str(head)} | ALWAYS
    with LLM(path, dtype="float32", num_threads=1, speculative_config=settings, **sizes, **options) as llm:
        prompting = [{"prompt_token_ids": each} for each in prompts()]
        outputs = llm.generate(prompting, GREEDY, use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == reference(path)
        assert sum(counts.num_draft_tokens for counts in llm.read_metrics().counts.values()) > 30
