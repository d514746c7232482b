"""Engines whose workers draft: outputs stay the same, and drafts are right as often as their model is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from drafting_checkpoints import (
    head_config,
    random_head,
    write_checkpoint,
    write_counting_head,
    write_counting_target,
)
from mixed_requests import run
from number_formats import BATCH_INVARIANT, REPEATABLE

from raycore.demo import demo_model_path
from raycore.messages import LoadView

LIMITS = {"max_num_seqs": 12, "max_num_batched_tokens": 96, "block_size": 8, "num_gpu_blocks_override": 200}
NUM_TOKENS = 5


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head for the demo model with random weights, and half of its vocabulary."""
    config = head_config(128, 320, draft_vocab_size=160)
    return write_checkpoint(tmp_path_factory.mktemp("head") / "head", config, random_head(config))


def speculative(model: Path | str, **settings: Any) -> dict[str, Any]:
    """Drafts of as many tokens as fit into a step, whether they pay or not."""
    always = {"num_speculative_tokens": NUM_TOKENS, "num_speculative_tokens_per_batch_size": [(1, 12, NUM_TOKENS)]}
    return {"speculative_config": {"model": str(model)} | always | settings}


def share_right(load: LoadView) -> float:
    return sum(load.drafts.accepted_per_position) / load.drafts.num_draft_tokens


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("blocks", [200, 13], ids=["enough blocks", "preemptions"])
@pytest.mark.parametrize("options", BATCH_INVARIANT)
def test_drafts_of_the_target_model_itself_are_always_accepted(
    options: dict[str, Any], blocks: int, depth: int
) -> None:
    options = LIMITS | options | {"num_gpu_blocks_override": blocks}
    expected, _ = run({}, **options)
    found, load = run({}, **options, **speculative(demo_model_path()), max_concurrent_batches=depth)
    assert found == expected
    assert (load.num_preemptions > 0) == (blocks == 13)
    assert load.drafts.num_draft_tokens > 200
    assert share_right(load) == 1.0


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("options", REPEATABLE)
def test_a_random_eagle_head_changes_no_output(head: Path, options: dict[str, Any], depth: int) -> None:
    options = LIMITS | options | {"num_gpu_blocks_override": 12}
    expected, _ = run({}, **options)
    aborted_at = {3: 5, 11: 1, 17: 9}
    found, load = run(aborted_at, **options, **speculative(head), max_concurrent_batches=depth)
    for seq_id in expected.keys() - aborted_at.keys():
        assert found[seq_id]["tokens"] == expected[seq_id]["tokens"]
        assert found[seq_id]["end"] == expected[seq_id]["end"]
        assert found[seq_id]["logprobs"] == expected[seq_id]["logprobs"]
    assert load.num_preemptions > 0
    assert load.drafts.num_draft_tokens > 500
    assert share_right(load) < 0.2


@pytest.mark.parametrize("depth", [1, 2])
def test_an_eagle_head_that_counts_like_its_target_is_mostly_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    target, head = write_counting_target(tmp_path / "target"), write_counting_head(tmp_path / "head")
    monkeypatch.setattr("mixed_requests.KINDS", [{"temperature": 0}, {"temperature": 0, "logprobs": 2}])
    options = LIMITS | {"model": target, "dtype": "float32", "batch_invariant": True}
    expected, _ = run({}, **options)
    found, load = run({}, **options, **speculative(head), max_concurrent_batches=depth)
    assert found == expected
    # bad words and the first token after a prompt break the pattern
    assert share_right(load) > 0.9


@pytest.mark.parametrize("depth", [1, 2])
def test_sequences_longer_than_the_draft_models_length_get_no_drafts(depth: int) -> None:
    options = speculative(demo_model_path(), max_model_len=8) | {"max_concurrent_batches": depth}
    _, load = run({}, **LIMITS, dtype="float32", **options)
    assert load.drafts.num_draft_tokens == 0
