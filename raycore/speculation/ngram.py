"""Guesses that a request continues as it did after an earlier occurrence of its last tokens ("prompt lookup").

Source: Apoorv Saxena, Prompt Lookup Decoding, 2023.
"""

from __future__ import annotations

from itertools import islice

from raycore.speculation.occurrences import Occurrences
from raycore.speculative_config import SpeculativeConfig

_MAX_COMPARED = 16
"""Number of earlier occurrences that are compared."""


class NgramGuesses:
    """Guesses of one request."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self.sequence = Occurrences(config.prompt_lookup_min)
        self._longest = config.prompt_lookup_max
        self._is_exact = config.prompt_lookup_min == config.prompt_lookup_max

    def propose(self, num_tokens: int) -> list[int]:
        """See `Guesses.propose`."""
        sequence = self.sequence
        if not sequence.has_repeated:
            return []
        num_compared = 1 if self._is_exact else _MAX_COMPARED
        best = None
        for end in islice(sequence.last(), num_compared):
            match = sequence.match(end, sequence.tokens, self._longest)
            if best is None or match.length > best.length:
                best = match
            if match.length == self._longest:
                break
        assert best is not None
        return sequence.after(best.end, num_tokens)
