"""Drafts that a GPU's kernels compute, beside padded steps that run as graphs, are those of the formulas."""

from __future__ import annotations

from pathlib import Path

import interpreted_triton  # noqa: F401  # before whatever imports Triton
from drafting_runners import DraftModelRunner, Eagle3Runner, check_whatever_comes

GPU = {"backend": "triton", "is_shared": False, "has_graphs": True}


def test_a_draft_model_on_a_gpu_gives_its_own_tokens() -> None:
    check_whatever_comes(DraftModelRunner(**GPU), 2, num_slots=2)


def test_an_eagle3_head_on_a_gpu_follows_the_formulas(tmp_path: Path) -> None:
    check_whatever_comes(Eagle3Runner(tmp_path / "head", {"draft_vocab_size": 40}, **GPU), 2, num_slots=2)
