"""Prompts of queries and of documents."""

from __future__ import annotations

from msgspec.structs import replace

from raycore.parts.pooling.models.late_interaction import LateInteraction

LATE = LateInteraction(7, 8, 6, 5, expansion_token=9)


def test_a_marker_comes_after_the_first_token() -> None:
    assert LATE.tokens([0, 41, 2], "document") == [0, 8, 41, 2]
    assert LATE.tokens([0, 41, 2], "query") == [0, 7, 41, 2, 9, 9]
    assert replace(LATE, expansion_token=None).tokens([0, 41, 2], "query") == [0, 7, 41, 2]


def test_long_texts_are_cut_but_for_their_last_token() -> None:
    text = [0, *range(41, 50), 2]
    assert LATE.tokens(text, "document") == [0, 8, 41, 42, 2]
    assert LATE.tokens(text, "query") == [0, 7, 41, 42, 43, 2]
    assert LATE.tokens(text, "document", max_length=4) == [0, 8, 41, 2]
    assert LATE.tokens(text, "document", max_length=9) == LATE.tokens(text, "document")
    assert LATE.tokens(text, "query", max_length=4) == LATE.tokens(text, "query"), "a query has its length"


def test_markers_are_looked_for_only_in_given_tokens() -> None:
    assert LATE.tokens([0, 7, 2], "document") == [0, 7, 2]
    assert LATE.tokens([0, 7, 2], "document", is_text=True) == [0, 8, 7, 2]


def test_tokens_that_fill_a_query_up_are_not_seen_unless_the_model_wants_that() -> None:
    query = LATE.tokens([0, 9, 2], "query")
    assert LATE.num_seen(query) == 4
    assert replace(LATE, attends_to_expansion=True).num_seen(query) == 6
    assert LATE.num_seen([0, 8, 41, 9]) == 4, "a document has none"
