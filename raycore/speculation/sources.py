"""Where guesses of requests' next tokens come from: the interface, and the guesses that the engine makes itself."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from raycore.speculation.ngram import NgramGuesses
from raycore.speculation.suffix import FinishedOutputs, SuffixGuesses
from raycore.speculative_config import SpeculativeConfig

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_MAX_INDEXED = 1024
"""Number of tokens of a request that are indexed before a step. A longer prompt takes several steps, without drafts."""


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

    def guess(
        self, slots: Ints, running: RunningTokens, limits: Ints, choose_lengths: ChooseLengths
    ) -> dict[int, list[int]]:
        """Return guesses by slot. Slots without guesses are left out.

        Args:
            slots: [n]: the requests that the next step computes. All their tokens have been received.
            limits: [n]: how many tokens of each slot's guess can be verified. A guess that cost nothing may be longer.
            choose_lengths: for guesses that cost something.
        """
        ...

    def forget(self, slot: int, num_prompt_tokens: int) -> None:
        """Note that a request has left its slot. `num_prompt_tokens`: of its tokens, the rest is output."""
        ...


class Guesses(Protocol):
    """Guesses of one request's next tokens."""

    @property
    def num_tokens(self) -> int: ...

    def extend(self, tokens: list[int]) -> None: ...

    def propose(self, num_tokens: int) -> list[int]: ...


class EngineGuesses:
    """Guesses from tokens that the engine has seen. They cost next to nothing, so every request has them."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._guesses: dict[int, Guesses] = {}
        """By slot."""
        self._finished = FinishedOutputs(config.suffix_decoding_max_cached_requests)

    def guess(
        self, slots: Ints, running: RunningTokens, limits: Ints, choose_lengths: ChooseLengths
    ) -> dict[int, list[int]]:
        """See `GuessSource.guess`."""
        found: dict[int, list[int]] = {}
        for slot, num_tokens in zip(slots.tolist(), running.received[slots].tolist(), strict=True):
            guesses = self._guesses.get(slot)
            if guesses is None:
                guesses = self._guesses[slot] = self._new_guesses()
            first = guesses.num_tokens
            end = min(num_tokens, first + _MAX_INDEXED)
            guesses.extend(running.tokens[slot, first:end].tolist())
            guess = guesses.propose(self._config.num_speculative_tokens) if end == num_tokens else []
            if guess:
                found[slot] = guess
        return found

    def forget(self, slot: int, num_prompt_tokens: int) -> None:
        """See `GuessSource.forget`."""
        guesses = self._guesses.pop(slot, None)
        if isinstance(guesses, SuffixGuesses):
            guesses.end(num_prompt_tokens)

    def _new_guesses(self) -> Guesses:
        if self._config.method == "ngram":
            return NgramGuesses(self._config)
        return SuffixGuesses(self._config, self._finished)
