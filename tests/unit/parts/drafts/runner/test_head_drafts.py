"""A head goes on from the target's hidden states, whatever has happened before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from drafting_runners import PROMPT, RUNNERS, Eagle3Runner, check_whatever_comes
from native_kernels import needs_kernels


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
