"""Counter-based random numbers: the number at a position depends only on the seed and the position.

SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) is counter-based:
output `i` is a mix of `state + i * gamma`. Each seed gets a state and an odd gamma of its own, as in the paper's
`split`, so that one seed's stream isn't a shifted copy of another's. The numbers of all rows in a step take a dozen
numpy operations.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MIN_BIT_FLIPS = 24
"""A gamma mixes badly if fewer pairs of neighboring bits than this differ. From the paper's `mixGamma`."""

_SHIFT_30, _SHIFT_27, _SHIFT_31, _SHIFT_11 = (np.uint64(bits) for bits in (30, 27, 31, 11))
_UNIT = np.float64(2.0**-53)
_MULTIPLIER_1, _MULTIPLIER_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class StreamKey(NamedTuple):
    """The key of a seed's stream of random numbers: two unsigned 64-bit integers."""

    state: int
    gamma: int


def stream_key(seed: int) -> StreamKey:
    """Return the key of a seed's stream. Any integer is valid; seeds that are equal modulo 2**64 share a stream."""
    first = (seed + _GOLDEN_GAMMA) & _MASK
    second = (first + _GOLDEN_GAMMA) & _MASK
    return StreamKey(state=_mix(first), gamma=_mix_gamma(second))


def uniform(
    state_R: NDArray[np.uint64], gamma_R: NDArray[np.uint64], position_R: NDArray[np.integer]
) -> NDArray[np.float64]:
    """Return float64[R] in [0, 1): for each i, number `position_R[i]` of the stream `(state_R[i], gamma_R[i])`.

    All numbers are multiples of 2**-53.
    """
    bits = state_R + gamma_R * position_R.astype(np.uint64)
    bits ^= bits >> _SHIFT_30
    bits *= _MULTIPLIER_1
    bits ^= bits >> _SHIFT_27
    bits *= _MULTIPLIER_2
    bits ^= bits >> _SHIFT_31
    bits >>= _SHIFT_11
    return bits.astype(np.float64) * _UNIT


def _mix(bits: int) -> int:
    """SplitMix64's output function (Stafford's variant 13) for one integer. `uniform` computes it for arrays."""
    bits = ((bits ^ (bits >> 30)) * int(_MULTIPLIER_1)) & _MASK
    bits = ((bits ^ (bits >> 27)) * int(_MULTIPLIER_2)) & _MASK
    return bits ^ (bits >> 31)


def _mix_gamma(bits: int) -> int:
    """Return an odd gamma whose bits alternate often enough: `mixGamma` with MurmurHash3's finalizer."""
    bits = ((bits ^ (bits >> 33)) * 0xFF51AFD7ED558CCD) & _MASK
    bits = ((bits ^ (bits >> 33)) * 0xC4CEB9FE1A85EC53) & _MASK
    gamma = (bits ^ (bits >> 33)) | 1
    flips = (gamma ^ (gamma >> 1)).bit_count()
    return gamma ^ 0xAAAAAAAAAAAAAAAA if flips < _MIN_BIT_FLIPS else gamma
