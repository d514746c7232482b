"""Detects that the end of an output repeats itself."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from raycore.sampling_params import RepetitionDetectionParams

REASON, DETAIL = "repetition", "repetition_detected"
"""The finish reason and the stop reason of an output that ends because of it."""


class RepetitionDetector:
    """Gets the tokens of one output. A token costs as many comparisons as there are sizes of patterns."""

    def __init__(self, params: RepetitionDetectionParams, max_tokens: int, output: Iterable[int] = ()) -> None:
        """`max_tokens`: of the output. `output`: its tokens so far."""
        first = max(1, params.min_pattern_size)
        last = min(params.max_pattern_size, max_tokens // max(2, params.min_count))
        sizes = np.arange(first, last + 1)
        self._past = np.full(max(0, last), -1, np.int32)
        """The last tokens, the newest first; -1 before the first one."""
        self._same = self._past[first - 1 :]
        """By size of pattern: the token that is so many tokens before the next one."""
        self._runs = np.zeros(len(sizes), np.int64)
        """By size of pattern: how many of the last tokens in a row are the same as those so many tokens before them."""
        self._needed = sizes * (params.min_count - 1)
        for token_id in output:
            self.add(token_id)

    def add(self, token_id: int) -> bool:
        """Take in the next token. Returns whether the output, up to and including it, ends with a repetition."""
        if not len(self._runs):
            return False
        self._runs = np.where(self._same == token_id, self._runs + 1, 0)
        self._past[1:] = self._past[:-1]  # NumPy copies overlapping slices as if there were two arrays
        self._past[0] = token_id
        return bool((self._runs >= self._needed).any())
