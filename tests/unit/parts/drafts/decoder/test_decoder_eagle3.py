"""An EAGLE-3 head computes what the formulas say, from the target's hidden states, whatever has happened before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from drafting_runners import MAX_DRAFT, PROMPT, SIZE, Eagle3Runner

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
