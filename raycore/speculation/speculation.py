"""Speculative decoding of one rank: guesses the next tokens of its decodes, so that a step may generate several.

Each running request has guesses of its own. A step verifies those that are expected to pay.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from raycore.messages import DraftStats
from raycore.speculation.acceptance import Acceptance
from raycore.speculation.choice import choose_lengths
from raycore.speculation.ngram import NgramGuesses
from raycore.speculation.step_times import StepTimes
from raycore.speculation.suffix import FinishedOutputs, SuffixGuesses
from raycore.speculative_config import SpeculativeConfig

_MAX_INDEXED = 1024
"""Number of tokens of a request that are indexed before a step. A longer prompt takes several steps, without drafts."""
_PATIENCE = 64
"""Number of steps in a row without drafts after which only some steps look for them."""
_REST = 4
"""After that, only every fourth step does."""


class RunningTokens(Protocol):
    """The tokens of the running requests, by slot."""

    tokens: NDArray[np.int32]
    received: NDArray[np.int64]
    """How many tokens each request has."""


class Guesses(Protocol):
    """Guesses of one request's next tokens."""

    @property
    def num_tokens(self) -> int: ...

    def extend(self, tokens: list[int]) -> None: ...

    def propose(self, num_tokens: int) -> list[int]: ...


class Speculation:
    """The drafts of one rank's requests."""

    def __init__(self, config: SpeculativeConfig, num_slots: int) -> None:
        self._config = config
        self._guesses: dict[int, Guesses] = {}
        """By slot."""
        self._finished = FinishedOutputs(config.suffix_decoding_max_cached_requests)
        self._acceptance = Acceptance(num_slots, config.num_speculative_tokens)
        self._plain, self._drafted = StepTimes(), StepTimes()
        self._num_steps = 0
        self._num_without_drafts = 0
        """Number of calls in a row after which no step had drafts."""
        self._num_drafts = self._num_draft_tokens = 0
        self._accepted = [0] * config.num_speculative_tokens
        """By place in a draft: number of tokens that were right."""

    def forget(self, slot: int, num_prompt_tokens: int) -> None:
        """Note that a request has left its slot. `num_prompt_tokens`: of its tokens, the rest is output."""
        guesses = self._guesses.pop(slot, None)
        if isinstance(guesses, SuffixGuesses):
            guesses.end(num_prompt_tokens)
        self._acceptance.forget(slot)

    def count(self, num_drafted: int, num_accepted: int) -> None:
        """Count a request's draft that a step has verified."""
        self._num_drafts += 1
        self._num_draft_tokens += num_drafted
        for place in range(num_accepted):
            self._accepted[place] += 1

    @property
    def stats(self) -> DraftStats:
        """What has become of the drafts so far."""
        return DraftStats(self._num_drafts, self._num_draft_tokens, tuple(self._accepted))

    def observe(self, num_tokens: int, has_drafts: bool, duration_s: float) -> None:
        """Note how long a step took. `num_tokens`: the tokens that it computed."""
        times = self._drafted if has_drafts else self._plain
        times.observe(self._num_steps, num_tokens, duration_s)
        self._num_steps += 1

    def propose(
        self, slots: NDArray[np.int64], running: RunningTokens, limits: NDArray[np.int64], budget: int, num_other: int
    ) -> dict[int, NDArray[np.int32]]:
        """Return the drafts that the next step should verify, by slot. Slots without drafts are left out.

        Args:
            slots: [n]: the decodes of the step. All their tokens have been received.
            limits: [n]: the maximum length of each slot's draft.
            budget: the maximum length of all drafts together.
            num_other: number of tokens that the step computes for other requests.
        """
        is_resting = self._num_without_drafts >= _PATIENCE and self._num_without_drafts % _REST
        self._num_without_drafts += 1
        if is_resting or budget <= 0 or not len(slots):
            return {}
        self._acceptance.compare(slots, running.tokens, running.received)
        found = self._guess(slots, running, limits)
        if not found:
            return {}
        drafts = self._choose(found, len(slots), num_other, budget)
        if drafts:
            self._num_without_drafts = 0
        return drafts

    def _guess(
        self, slots: NDArray[np.int64], running: RunningTokens, limits: NDArray[np.int64]
    ) -> dict[int, list[int]]:
        """Return each slot's guess, if it has one."""
        found: dict[int, list[int]] = {}
        longest = self._config.num_speculative_tokens
        received = running.received[slots].tolist()
        for slot, num_tokens, limit in zip(slots.tolist(), received, limits.tolist(), strict=True):
            guesses = self._guesses.get(slot)
            if guesses is None:
                guesses = self._guesses[slot] = self._new_guesses()
            first = guesses.num_tokens
            end = min(num_tokens, first + _MAX_INDEXED)
            guesses.extend(running.tokens[slot, first:end].tolist())
            if end < num_tokens:
                continue
            guess = guesses.propose(longest)
            if guess:
                self._acceptance.note(slot, num_tokens, guess)
                if limit > 0:
                    found[slot] = guess[:limit]
        return found

    def _new_guesses(self) -> Guesses:
        return (
            NgramGuesses(self._config)
            if self._config.method == "ngram"
            else SuffixGuesses(self._config, self._finished)
        )

    def _choose(
        self, found: dict[int, list[int]], num_decodes: int, num_other: int, budget: int
    ) -> dict[int, NDArray[np.int32]]:
        """Return the beginnings of the guesses that are worth verifying."""
        slots = np.array(list(found))
        lengths = np.array([len(guess) for guess in found.values()])
        num_plain = num_decodes + num_other
        sizes = num_plain + np.arange(1, min(int(lengths.sum()), budget) + 1)
        plain_s, drafted_s = self._durations(num_plain, sizes)
        chosen = choose_lengths(lengths, self._acceptance.rates(slots), num_decodes, plain_s, drafted_s)
        return {
            slot: np.array(found[slot][:length], np.int32)
            for slot, length in zip(slots.tolist(), chosen.tolist(), strict=True)
            if length
        }

    def _durations(self, num_plain: int, sizes: NDArray[np.int64]) -> tuple[float, NDArray[np.float64]]:
        """Return how long a step of `num_plain` tokens takes, and steps of these sizes with drafts, in seconds."""
        known = self._plain.estimate(self._num_steps, np.array([num_plain]))
        plain_s = 1.0 if known is None else float(known[0])
        drafted_s = self._drafted.estimate(self._num_steps, sizes, plain_s)
        return plain_s, np.full(len(sizes), plain_s) if drafted_s is None else drafted_s
