from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter
from types import SimpleNamespace

import numpy as np
import pytest
from drafts_by_slot import by_slot
from hypothesis import given
from hypothesis import strategies as st

from raycore.parts.drafts.config.speculative import SpeculativeConfig
from raycore.parts.drafts.guesses.ngram import NgramGuesses
from raycore.parts.drafts.guesses.sources import GuessSource
from raycore.parts.drafts.guesses.suffix import FinishedOutputs, SuffixGuesses


def guess(guesses: GuessSource, *sequences: list[int]) -> list[list[int]]:
    """Guesses of the tokens after these sequences, which are in slots 1, 3, 5 and so on."""
    slots = 2 * np.arange(len(sequences)) + 1
    running = SimpleNamespace(tokens=np.full((10, 60), 3, np.int32), received=np.zeros(10, np.int64))
    for slot, tokens in zip(slots.tolist(), sequences, strict=True):
        running.tokens[slot, : len(tokens)] = tokens
        running.received[slot] = len(tokens)
    found = guesses.guess(slots, running, np.full(len(slots), 100), lambda slots, lengths, drafting_s: lengths)
    return [by_slot(found).get(slot, []) for slot in slots.tolist()]


def ngram(*sequences: list[int], least: int, most: int, num_tokens: int = 3) -> list[list[int]]:
    config = SpeculativeConfig("ngram", num_tokens, prompt_lookup_min=least, prompt_lookup_max=most)
    return guess(NgramGuesses(config), *sequences)


def suffix(tokens: list[int], finished: Iterable[list[int]] = (), num_tokens: int = 8, **settings: float) -> list[int]:
    settings = {f"suffix_decoding_{name}": value for name, value in settings.items()}
    guesses = SuffixGuesses(SpeculativeConfig("suffix", num_tokens, **settings), perf_counter)  # type: ignore[arg-type]
    for output in finished:
        guesses.finished.add(output)
    return guess(guesses, tokens)[0]


@pytest.mark.parametrize(
    ("tokens", "least", "most", "expected"),
    [
        ([1, 2, 3, 4, 5, 1, 2], 2, 2, [3, 4, 5]),
        ([1, 2, 3, 4, 5, 1, 2], 3, 3, []),
        # the latest of equally long matches
        ([1, 2, 7, 0, 1, 2, 8, 0, 1, 2], 2, 2, [8, 0, 1]),
        # a longer match is better than a later one
        ([5, 1, 2, 7, 7, 7, 1, 2, 8, 0, 5, 1, 2], 2, 3, [7, 7, 7]),
        ([5, 1, 2, 7, 7, 7, 1, 2, 8, 0, 5, 1, 2], 2, 2, [8, 0, 5]),
        # a loop goes on
        ([4, 6, 6], 1, 1, [6, 6, 6]),
        ([3, 1, 2, 1, 2], 2, 2, [1, 2, 1]),
        ([1], 1, 2, []),
        # which would mean something else as characters
        ([0xFEFF, 0xD800, 0xDFFF, 0, 0x10FFFF, 0xFEFF, 0xD800], 2, 2, [0xDFFF, 0, 0x10FFFF]),
    ],
)
def test_a_guess_continues_the_longest_earlier_ngram(
    tokens: list[int], least: int, most: int, expected: list[int]
) -> None:
    assert ngram(tokens, least=least, most=most) == [expected]


@given(
    sequences=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=50), max_size=5),
    least=st.integers(1, 6),
    more=st.integers(0, 3),
)
def test_ngram_guesses_of_several_sequences_are_independent(sequences: list[list[int]], least: int, more: int) -> None:
    """Lengths differ, and there is something after each sequence."""
    found = ngram(*sequences, least=least, most=least + more, num_tokens=1)
    for tokens, guess in zip(sequences, found, strict=True):
        size = len(tokens)
        matches = [
            (length, end)
            for length in range(least, least + more + 1)
            for end in range(length, size)
            if tokens[end - length : end] == tokens[size - length :]
        ]
        assert guess == ([tokens[max(matches)[1]]] if matches else [])


def test_a_suffix_guess_takes_the_most_frequent_continuations() -> None:
    past = [1, 2, 5, 0, 1, 2, 6, 0, 1, 2, 5, 9]
    # after the 5 came a 9 and a 0; of equally frequent tokens, the latest counts
    assert suffix([*past, 1, 2]) == [5, 9]
    assert suffix([*past, 1, 2], min_token_prob=0.5) == [5]
    assert suffix([*past, 1, 2], min_token_prob=0.7) == []


def test_a_suffix_guess_is_at_most_as_long_as_its_match_allows() -> None:
    past = [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]
    assert suffix([*past, 1, 2]) == [3, 4]
    assert suffix([*past, 1, 2, 3, 4]) == [5, 6, 7, 8]
    assert suffix([*past, 1, 2], max_spec_factor=2) == [3, 4, 5, 6]
    assert suffix([*past, 1, 2, 3, 4], max_tree_depth=6) == [5, 6]
    assert suffix([*past, 1, 2, 3, 4], num_tokens=3) == [5, 6, 7]


def test_suffix_guesses_come_from_finished_outputs_too() -> None:
    finished = [[1, 2, 3, 4, 5]]
    assert suffix([7, 1, 2, 3], finished) == [4, 5]
    # the longest match counts, wherever it is
    assert suffix([2, 3, 8, 8, 1, 2, 3], finished) == [4, 5]


def test_a_finished_request_leaves_its_output_but_not_its_prompt() -> None:
    guesses = SuffixGuesses(SpeculativeConfig("suffix", 8), perf_counter)
    guess(guesses, [9, 9, 1, 2, 3, 4, 5])
    guesses.forget(1, num_prompt_tokens=2)
    guesses.forget(3, num_prompt_tokens=2)
    assert guess(guesses, [7, 1, 2, 3], [9, 9]) == [[4, 5], []]


def test_guesses_do_not_run_from_one_output_into_the_next() -> None:
    assert suffix([1, 2], [[1, 2, 3], [4, 5, 6]]) == [3]


def test_the_oldest_outputs_are_forgotten() -> None:
    finished = FinishedOutputs(4)
    for output in range(100):
        finished.add([output, output + 1, output + 2, output + 3])
    known = [token for each in finished.sequences() for token in each.tokens]
    assert {98, 99, 100, 101} < set(known)
    assert len(known) <= 20
