from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from raycore.parts.drafts.guesses.occurrences import Match, Occurrences

TOKENS = st.lists(st.integers(0, 2), max_size=40)


@given(parts=st.lists(TOKENS, min_size=1, max_size=4), length=st.integers(1, 4))
def test_all_earlier_occurrences_are_found_the_latest_first(parts: list[list[int]], length: int) -> None:
    sequence = Occurrences(length)
    for part in parts:
        sequence.extend(part)
    tokens = [token for part in parts for token in part]
    assert sequence.tokens == tokens
    if len(tokens) >= length:
        last = tokens[-length:]
        ends = [end for end in range(length, len(tokens) + 1) if tokens[end - length : end] == last]
        assert list(sequence.of(tuple(last))) == ends[::-1]
        assert list(sequence.last()) == ends[-2::-1]


@given(tokens=TOKENS, longest=st.integers(2, 6))
def test_matches_are_as_long_as_the_tokens_are_the_same(tokens: list[int], longest: int) -> None:
    sequence = Occurrences(2)
    sequence.extend(tokens)
    for end in sequence.last():
        length = sequence.match(end, tokens, longest).length
        assert tokens[end - length : end] == tokens[-length:]
        is_longest = length == min(longest, end)
        assert is_longest or tokens[end - length - 1] != tokens[-length - 1]


def test_a_match_may_be_in_another_sequence() -> None:
    sequence = Occurrences(2)
    sequence.extend([9, 1, 2, 3, 4])
    assert sequence.match(4, [8, 1, 2, 3], 8) == Match(4, 3)


def test_tokens_after_the_end_of_a_sequence_are_taken_to_repeat() -> None:
    sequence = Occurrences(1)
    sequence.extend([5, 1, 2, 3])
    assert sequence.after(1, 2) == [1, 2]
    assert sequence.after(1, 7) == [1, 2, 3, 1, 2, 3, 1]
    assert sequence.after(4, 3) == []
