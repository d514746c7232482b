"""Workers that share a model draft for it together, or one of them does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from drafting_checkpoints import STEP, VOCAB, write_counting_head, write_counting_target

from raycore import LLM, SamplingParams

NUM_TOKENS = 40
FIRST = [3, 50, 200]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("checkpoints")
    return {
        "target": write_counting_target(directory / "target"),
        "head": write_counting_head(directory / "head"),
    }


@pytest.mark.parametrize("is_async", [False, True], ids=["one step", "steps in flight"])
@pytest.mark.parametrize(
    ("name", "settings"),
    [("target", {}), ("target", {"draft_tensor_parallel_size": 1}), ("head", {})],
    ids=["a shared draft model", "a draft model of one worker", "a head"],
)
def test_workers_propose_drafts_that_the_target_mostly_accepts(
    ray_cluster, checkpoints: dict[str, Path], name: str, settings: dict[str, Any], is_async: bool
) -> None:
    always = {"num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": [(1, 1, 4)]}
    speculative = {"model": str(checkpoints[name])} | always | settings
    options: dict[str, Any] = {"tensor_parallel_size": 2, "num_threads": 1, "standby_delay_s": None}
    options |= {"max_model_len": 128, "async_scheduling": is_async}
    with LLM(checkpoints["target"], speculative_config=speculative, **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": [9, first]} for first in FIRST], params, use_tqdm=False)
        found = [list(output.outputs[0].token_ids) for output in outputs]
        counts = llm.read_metrics().counts[0]
    assert found == [[(first + STEP * offset) % VOCAB for offset in range(1, NUM_TOKENS + 1)] for first in FIRST]
    assert counts.num_draft_tokens > 10
    assert counts.num_accepted_tokens > 0.5 * counts.num_draft_tokens
