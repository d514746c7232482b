"""Caps of attention scores, and sinks, in both kinds of plain torch attention, checked against the formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import hypothesis
import pytest
import torch
from attention_contract import Batch, Outcome, Sizes, batch_invariant, gathering, sizes

from raycore.attention import explicit

PARTS = pytest.mark.parametrize(
    "parts",
    [{"softcap": 1.5}, {"has_sinks": True}, {"softcap": 0.7, "has_sinks": True}],
    ids=["cap", "sinks", "both"],
)
ATTENTIONS = pytest.mark.parametrize("attend", [gathering, batch_invariant])
# whole prompts, equal ones too, later chunks, and decodes of several lengths
MIXED = Sizes(
    num_kv_heads=2, group=3, tokens=(40, 7, 0), chunks=((0, 9), (0, 9), (0, 5), (33, 12)), window=20, has_norm=True
)


@PARTS
@ATTENTIONS
@hypothesis.settings(max_examples=25)
@hypothesis.given(drawn=sizes([torch.float32, torch.bfloat16, torch.float16], longest=300, most_rows=40))
def test_attention_with_caps_and_sinks_follows_the_formula(
    attend: Callable[[Batch], Outcome], parts: dict, drawn: Sizes
) -> None:
    # norms of queries and keys in plain torch round more than once in 16 bits
    drawn = replace(drawn, **parts, has_norm=drawn.has_norm and drawn.dtype == torch.float32)
    hypothesis.note(f"{drawn}")
    batch = Batch(drawn)
    if batch.sequences:
        batch.check(attend(batch))


@PARTS
@ATTENTIONS
@pytest.mark.parametrize("window", [None, 20])
def test_attention_computed_some_tokens_at_a_time_follows_the_formula(
    attend: Callable[[Batch], Outcome], parts: dict, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explicit, "SCORE_BYTES", 4 * 6 * 30)
    batch = Batch(replace(MIXED, window=window, **parts))
    batch.check(attend(batch))


@ATTENTIONS
def test_a_score_cap_and_sinks_each_change_the_output(attend: Callable[[Batch], Outcome]) -> None:
    plain = attend(Batch(MIXED)).out_TX
    for parts in ({"softcap": 1.5}, {"has_sinks": True}):
        assert not torch.allclose(attend(Batch(replace(MIXED, **parts))).out_TX, plain, atol=1e-2)


@ATTENTIONS
def test_a_model_without_caps_and_sinks_is_computed_by_sdpa(
    attend: Callable[[Batch], Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explicit.ExplicitAttention, "__call__", None)
    batch = Batch(MIXED)
    batch.check(attend(batch))
