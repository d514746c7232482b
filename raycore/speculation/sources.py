"""Where guesses of requests' next tokens come from: the interface, and the guesses that the engine makes itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from raycore.speculation.ngram import NgramGuesses
from raycore.speculation.occurrences import Occurrences
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

    drafting_s: float
    """How long it took to make the last guesses, in seconds, if that is a cost that `choose_lengths` was told."""
    prompts_s: float
    """How long it took to read the prompts of new requests before that, in seconds. Each is read once."""

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

    sequence: Occurrences
    """The request's tokens so far. Its new ones are appended here."""

    def propose(self, num_tokens: int) -> list[int]:
        """Return a guess of up to `num_tokens` tokens."""
        ...


class EngineGuesses:
    """Guesses from tokens that the engine has seen. They cost little, so every request has them."""

    drafting_s = 0.0

    def __init__(self, config: SpeculativeConfig, clock: Callable[[], float]) -> None:
        """`clock`: returns seconds."""
        self._config = config
        self._clock = clock
        self.prompts_s = 0.0
        self._guesses: dict[int, Guesses] = {}
        """By slot."""
        self._finished = FinishedOutputs(config.suffix_decoding_max_cached_requests)

    def guess(
        self, slots: Ints, running: RunningTokens, limits: Ints, choose_lengths: ChooseLengths
    ) -> dict[int, list[int]]:
        """See `GuessSource.guess`."""
        found: dict[int, list[int]] = {}
        self.prompts_s = 0.0
        longest = self._config.num_speculative_tokens
        received = running.received[slots]
        last_ids = running.tokens[slots, received - 1].tolist()
        for slot, num_tokens, last_id in zip(slots.tolist(), received.tolist(), last_ids, strict=True):
            guesses = self._guesses.get(slot)
            if guesses is None:
                guesses = self._begin(slot, running.tokens[slot, : min(num_tokens, _MAX_INDEXED)].tolist())
            elif (num_known := len(guesses.sequence.tokens)) == num_tokens - 1:  # almost always
                guesses.sequence.append(last_id)
            else:
                end = min(num_tokens, num_known + _MAX_INDEXED)
                guesses.sequence.extend(running.tokens[slot, num_known:end].tolist())
            guess = guesses.propose(longest) if len(guesses.sequence.tokens) == num_tokens else []
            if guess:
                found[slot] = guess
        return found

    def forget(self, slot: int, num_prompt_tokens: int) -> None:
        """See `GuessSource.forget`."""
        guesses = self._guesses.pop(slot, None)
        if isinstance(guesses, SuffixGuesses):
            guesses.end(num_prompt_tokens)

    def _begin(self, slot: int, tokens: list[int]) -> Guesses:
        """Begin to guess a slot's tokens. `tokens`: those that it has, or the first ones."""
        began_s = self._clock()
        is_ngram = self._config.method == "ngram"
        guesses = NgramGuesses(self._config) if is_ngram else SuffixGuesses(self._config, self._finished)
        self._guesses[slot] = guesses
        guesses.sequence.extend(tokens)
        self.prompts_s += self._clock() - began_s
        return guesses
