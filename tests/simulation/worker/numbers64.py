"""Hashes of 64-bit numbers, in numpy arrays and alone. Equal in all processes."""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_GOLDEN, _FACTOR, _HALF = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(32)


def mix(words: Words, *others: Words | np.uint64) -> Words:
    """A hash of several numbers, element by element. Their order counts. The upper bits depend on all bits."""
    for other in others:
        words = words * _GOLDEN
        words += other
        words ^= words >> _HALF
        words *= _FACTOR
    return words


def as_words(numbers: NDArray[np.generic]) -> Words:
    """Integers as words of the same size of array."""
    return numbers.astype(np.int64).view(np.uint64)


def key_of(*values: object) -> np.uint64:
    """A number that stands for values, by what `repr` says of them."""
    return np.uint64(int.from_bytes(blake2b(repr(values).encode(), digest_size=8).digest(), "little"))


@lru_cache
def odd_words(purpose: str, count: int) -> Words:
    """So many odd numbers: factors that lose nothing."""
    return mix(np.arange(count, dtype=np.uint64), key_of(purpose)) | np.uint64(1)
