"""An EAGLE-3 head computes what the formulas say, from the target's hidden states, whatever has happened before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from drafting_checkpoints import random_head, write_checkpoint
from drafting_runners import CONFIG, MAX_DRAFT, PROMPT, RUNNERS, SIZE, Eagle3Runner, check_whatever_comes
from native_kernels import needs_kernels
from small_model import SPEC

from raycore.errors import InvalidCheckpoint
from raycore.parts.drafts.checkpoint import load_eagle3_spec
from raycore.parts.drafts.weights import load_eagle3_weights
from raycore.weights.share import WeightShare

HEADS: dict[str, dict[str, Any]] = {
    "the target's embedding and vocabulary": {},
    "its own embedding, part of the vocabulary": {"draft_vocab_size": 40},
    "another size": {"hidden_size": 24, "target_hidden_size": SIZE, "draft_vocab_size": 40},
    "norm before residual": {"norm_before_residual": True},
}


@pytest.mark.parametrize("changes", HEADS.values(), ids=HEADS.keys())
def test_the_first_eagle3_drafts_follow_the_formulas(tmp_path: Path, changes: dict[str, Any]) -> None:
    drafting = Eagle3Runner(tmp_path / "head", changes)
    drafting.sequences.start(2, PROMPT)
    drafting.sequences.start(0, PROMPT[:2])
    drafting.check({2: MAX_DRAFT, 0: 3})


@pytest.mark.parametrize(
    "options",
    [pytest.param(RUNNERS[each], marks=needs_kernels if each == "native" else (), id=each) for each in RUNNERS],
)
def test_eagle3_drafts_follow_the_formulas_whatever_came_before(tmp_path: Path, options: dict[str, Any]) -> None:
    check_whatever_comes(Eagle3Runner(tmp_path / "head", {}, **options), 20)


def test_the_eagle3_head_reuses_a_shared_prefix(tmp_path: Path) -> None:
    drafting = Eagle3Runner(tmp_path / "head", {})
    drafting.sequences.start(0, PROMPT)
    drafting.sequences.start(1, PROMPT, shared_with=0)
    drafting.check({1: 3, 0: 2})


def test_an_eagle3_head_that_lacks_tensors_is_refused(tmp_path: Path) -> None:
    config = CONFIG | {"draft_vocab_size": 40}
    tensors = random_head(config)
    del tensors["d2t"]
    with pytest.raises(InvalidCheckpoint, match="no tensor d2t, which draft_vocab_size=40 needs"):
        _load(write_checkpoint(tmp_path / "no d2t", config, tensors))
    tensors = random_head(config)
    tensors["d2t"] += SPEC.vocab_size
    with pytest.raises(InvalidCheckpoint, match="aren't in the target's vocabulary"):
        _load(write_checkpoint(tmp_path / "wrong d2t", config, tensors))
    config = CONFIG | {"hidden_size": 24, "target_hidden_size": SIZE}
    with pytest.raises(InvalidCheckpoint, match="hidden_size=24 isn't that of the target's embedding, 32"):
        _load(write_checkpoint(tmp_path / "no embedding", config, random_head(config)))


def _load(path: Path) -> None:
    spec, head = load_eagle3_spec(path, SPEC)
    load_eagle3_weights(WeightShare(spec, torch.float32), head, path)
