from __future__ import annotations

import pytest

from raycore.speculation.ngram import NgramGuesses
from raycore.speculation.suffix import FinishedOutputs, SuffixGuesses
from raycore.speculative_config import SpeculativeConfig

NONE = FinishedOutputs(0)


def ngram(tokens: list[int], least: int, most: int, num_tokens: int = 3) -> list[int]:
    guesses = NgramGuesses(SpeculativeConfig("ngram", num_tokens, prompt_lookup_min=least, prompt_lookup_max=most))
    guesses.sequence.extend(tokens)
    return guesses.propose(num_tokens)


def suffix(tokens: list[int], finished: FinishedOutputs = NONE, num_tokens: int = 8, **settings: float) -> list[int]:
    settings = {f"suffix_decoding_{name}": value for name, value in settings.items()}
    guesses = SuffixGuesses(SpeculativeConfig("suffix", num_tokens, **settings), finished)  # type: ignore[arg-type]
    guesses.sequence.extend(tokens)
    return guesses.propose(num_tokens)


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
        ([], 1, 2, []),
    ],
)
def test_ngrams(tokens: list[int], least: int, most: int, expected: list[int]) -> None:
    assert ngram(tokens, least, most) == expected


def test_a_suffix_continues_as_it_mostly_did() -> None:
    past = [1, 2, 5, 0, 1, 2, 6, 0, 1, 2, 5, 9]
    # after the 5 came a 9 and a 0; of equally frequent tokens, the latest counts
    assert suffix([*past, 1, 2]) == [5, 9]
    assert suffix([*past, 1, 2], min_token_prob=0.5) == [5]
    assert suffix([*past, 1, 2], min_token_prob=0.7) == []


def test_a_guess_is_as_long_as_its_match() -> None:
    past = [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]
    assert suffix([*past, 1, 2]) == [3, 4]
    assert suffix([*past, 1, 2, 3, 4]) == [5, 6, 7, 8]
    assert suffix([*past, 1, 2], max_spec_factor=2) == [3, 4, 5, 6]
    assert suffix([*past, 1, 2, 3, 4], max_tree_depth=6) == [5, 6]
    assert suffix([*past, 1, 2, 3, 4], num_tokens=3) == [5, 6, 7]


def test_guesses_come_from_finished_outputs_too() -> None:
    finished = FinishedOutputs(100)
    done = SuffixGuesses(SpeculativeConfig("suffix", 8), finished)
    done.sequence.extend([9, 9, 1, 2, 3, 4, 5])
    done.end(num_prompt_tokens=2)
    assert suffix([7, 1, 2, 3], finished) == [4, 5]
    assert suffix([9, 9], finished) == [], "the prompt isn't an output"
    # the longest match counts, wherever it is
    assert suffix([2, 3, 8, 8, 1, 2, 3], finished) == [4, 5]


def test_guesses_do_not_run_from_one_output_into_the_next() -> None:
    finished = FinishedOutputs(100)
    for output in ([1, 2, 3], [4, 5, 6]):
        finished.add(output)
    assert suffix([1, 2], finished) == [3]


def test_the_oldest_outputs_are_forgotten() -> None:
    finished = FinishedOutputs(4)
    for output in range(100):
        finished.add([output, output + 1, output + 2, output + 3])
    assert suffix([97, 98], finished) == [99, 100]
    assert suffix([50, 51], finished) == []
    assert sum(len(each.tokens) for each in finished.sequences()) <= 20
