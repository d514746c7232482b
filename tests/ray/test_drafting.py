"""Workers that share a model draft for it together, or one of them does."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from drafting_checkpoints import STEP, VOCAB, write_counting_head, write_counting_target
from safetensors.torch import load_file, save_file

from raycore import LLM, SamplingParams
from raycore.checkpoint.weight_files import read_header

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
        check(llm)


def check(llm: LLM) -> None:
    """Check that an engine counts, and that most drafts are right."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    before = llm.read_metrics().counts[0]
    outputs = llm.generate([{"prompt_token_ids": [9, first]} for first in FIRST], params, use_tqdm=False)
    found = [list(output.outputs[0].token_ids) for output in outputs]
    counts = llm.read_metrics().counts[0]
    assert found == [[(first + STEP * offset) % VOCAB for offset in range(1, NUM_TOKENS + 1)] for first in FIRST]
    num_drafts = counts.num_draft_tokens - before.num_draft_tokens
    assert num_drafts > 10
    assert counts.num_accepted_tokens - before.num_accepted_tokens > 0.5 * num_drafts


@pytest.mark.timeout(240)
def test_a_head_of_several_stages_reads_saved_weights_and_new_ones(
    ray_cluster, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """The last stage has the embedding, too, because the head reads it."""
    speculative = {
        "model": str(checkpoints["head"]),
        "num_speculative_tokens": 4,
        "num_speculative_tokens_per_batch_size": [(1, 1, 4)],
    }
    options: dict[str, Any] = {"pipeline_parallel_size": 2, "num_threads": 1, "standby_delay_s": None}
    options |= {"max_model_len": 128}
    drafts: dict[str, Any] = {"speculative_config": speculative, "async_scheduling": True}
    with LLM(checkpoints["target"], **options) as plain:
        plain.save_sharded_state(tmp_path / "saved")
    with LLM(tmp_path / "saved", load_format="sharded_state", **options, **drafts) as llm:
        check(llm)
    other = tmp_path / "other"
    shutil.copytree(checkpoints["target"], other)
    tensors = load_file(other / "model.safetensors")
    save_file({name: each.flip(0).contiguous() for name, each in tensors.items()}, other / "model.safetensors")
    with LLM(other, **options, **drafts) as llm:
        llm.reload_weights(checkpoints["target"])
        check(llm)
        llm.save_sharded_state(tmp_path / "again")
    first, last = (read_header(tmp_path / "again" / f"model-pp-{stage}-tp-0-part-0.safetensors") for stage in (0, 1))
    assert "model.embed_tokens.weight" in first
    assert "model.embed_tokens.weight" not in last
