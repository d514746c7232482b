"""Where guesses of requests' next tokens come from: the interface."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from raycore.parts.drafts.guesses.drafts import Drafts, Ints

Floats = NDArray[np.float64]


class RunningTokens(Protocol):
    """The tokens of the running requests, by slot."""

    tokens: NDArray[np.int32]
    received: NDArray[np.int64]
    """How many tokens each request has."""


class ChooseLengths(Protocol):
    """Decides how many tokens it pays to guess for a step."""

    def __call__(self, slots: Ints, lengths: Ints, drafting_s: Floats) -> Ints:
        """Return how many tokens to guess for each of `slots`.

        Args:
            lengths: for each slot, the maximum.
            drafting_s: how long it takes to guess up to 1, 2, ... tokens for each slot, in seconds.
        """
        ...


class GuessSource(Protocol):
    """Makes guesses of all running requests' next tokens."""

    drafting_s: float
    """How long it took to make the last guesses, in seconds, if that is a cost that `choose_lengths` was told."""
    prompts_s: float
    """How long it took to read the prompts of new requests before that, in seconds. Each is read once."""

    def guess(self, slots: Ints, running: RunningTokens, limits: Ints, choose_lengths: ChooseLengths) -> Drafts:
        """Return guesses for those of `slots` that have one.

        Args:
            slots: [n], ascending: the requests that the next step computes. All their tokens have been received.
            limits: [n]: how many tokens of each slot's guess can be verified. A guess that cost nothing may be longer.
            choose_lengths: for guesses that cost something.
        """
        ...

    def forget(self, slot: int, num_prompt_tokens: int) -> None:
        """Note that a request has left its slot. `num_prompt_tokens`: of its tokens, the rest is output."""
        ...
