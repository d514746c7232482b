"""Drafts that workers make from the tokens of the running requests, or get from another worker."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raycore.messages import StepPlan
from raycore.parts.drafts.guesses.drafts import NO_DRAFTS, Drafts
from raycore.parts.drafts.guesses.sources import Floats, GuessSource
from raycore.parts.drafts.runner.drafter import StepDrafting
from raycore.parts.drafts.runner.shared_drafts import ShareDrafts
from raycore.step.batch import Ints
from raycore.step.device_batch import DeviceBatch


@dataclass(slots=True)
class KnownTokens:
    """A batch's arrays. Implements `RunningTokens`."""

    tokens: NDArray[np.int32]
    received: Ints


class TokenGuesses(StepDrafting):
    """Guesses by n-grams or suffixes. All workers of an engine make the same ones."""

    def __init__(self, source: GuessSource, batch: DeviceBatch) -> None:
        host = batch.host
        self._source = source
        self._known = KnownTokens(host.token_ids, host.num_known)
        self._num_prompt = np.zeros(len(host.num_known), np.int64)
        """By slot: number of tokens in the prompt of its request."""

    def apply(self, plan: StepPlan) -> None:
        for slot in plan.freed_slots:
            self._source.forget(slot, int(self._num_prompt[slot]))
        for request in plan.new_requests:
            self._num_prompt[request.slot] = request.num_prompt_tokens

    def propose(self, slots: Ints, limits: Ints) -> Drafts:
        found = self._source.guess(slots, self._known, limits, _all_tokens)
        return found.shortened(np.minimum(found.lengths, limits[np.searchsorted(slots, found.slots)]))


class SharedDrafts(StepDrafting):
    """Drafts that another worker makes."""

    def __init__(self, share: ShareDrafts) -> None:
        self._share = share

    def propose(self, slots: Ints, limits: Ints) -> Drafts:
        return self._share(NO_DRAFTS, slots, limits)


def _all_tokens(slots: Ints, lengths: Ints, drafting_s: Floats) -> Ints:
    """Implements `ChooseLengths`: the engine has chosen."""
    return lengths
