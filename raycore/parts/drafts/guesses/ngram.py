"""Guesses that a request continues as it did after an earlier occurrence of its last tokens ("prompt lookup").

Source: Apoorv Saxena, Prompt Lookup Decoding, 2023.

Nothing is kept between steps: all tokens of a request are searched each time. That reads four bytes for each token, of
which a step's attention reads keys and values.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from raycore.parts.drafts.config.speculative import SpeculativeConfig
from raycore.parts.drafts.guesses.drafts import NO_DRAFTS, Drafts, Ints
from raycore.parts.drafts.guesses.sources import ChooseLengths, RunningTokens


class NgramGuesses:
    """Implements `GuessSource`."""

    drafting_s = prompts_s = 0.0

    def __init__(self, config: SpeculativeConfig) -> None:
        self._num_tokens = config.num_speculative_tokens
        self._shortest, self._longest = config.prompt_lookup_min, config.prompt_lookup_max

    def guess(self, slots: Ints, running: RunningTokens, limits: Ints, choose_lengths: ChooseLengths) -> Drafts:
        lengths = running.received[slots].tolist()
        ends = [
            find_match(running.tokens[slot, :length], self._shortest, self._longest)
            for slot, length in zip(slots.tolist(), lengths, strict=True)
        ]
        if not any(ends):
            return NO_DRAFTS
        found = np.flatnonzero(ends)
        slots, end, length = slots[found], np.array(ends)[found, None], np.array(lengths)[found, None]
        # after a sequence's last token, it is taken to repeat from the match's end
        positions = end + np.arange(self._num_tokens) % (length - end)
        return Drafts(slots, np.full(len(found), self._num_tokens), running.tokens[slots[:, None], positions])

    def forget(self, slot: int, num_prompt_tokens: int) -> None:
        """Do nothing: nothing is kept."""


def find_match(tokens: NDArray[np.int32], shortest: int, longest: int) -> int:
    """Return where the last tokens have occurred before: the position after them, or 0.

    The occurrence with the longest match counts, and of equally long ones the latest.

    Args:
        tokens: [n]: token ids below 0x110000, which no vocabulary exceeds.
        shortest: the least number of tokens that must be the same.
        longest: more tokens than this aren't compared.
    """
    # as characters, because strings are searched faster than arrays
    text = tokens.astype("<i4", copy=False).tobytes().decode("utf-32-le", "surrogatepass")
    for length in range(min(longest, len(text) - 1), shortest - 1, -1):
        start = text.rfind(text[-length:], 0, -1)
        if start >= 0:
            return start + length
    return 0
