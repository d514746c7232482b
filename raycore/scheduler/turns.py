"""Which decodes and how many tokens of prompts a step gets, if the steps in flight are in different stages."""

from __future__ import annotations

from collections.abc import Iterable

from raycore.scheduler.request import Request
from raycore.scheduler.slots import Batch, SlotTable

_PARTS_OF_PROMPTS = 4
"""With n turns, a step gets at most one of 4 n parts of all prompts' tokens, because the later stages of a pipeline
have nothing to do while the first one computes the first part."""
_LEAST_FRACTION = 1 / 16
"""But this fraction of `max_num_batched_tokens` is never divided, because steps of few tokens are inefficient."""


class Turns:
    """Running decodes take turns in `number` steps. With 1, each step gets all of them."""

    def __init__(self, number: int, slots: SlotTable, max_step_tokens: int, *, divides_prompts: bool) -> None:
        """`divides_prompts`: whether any part of a prompt may be computed in a step of its own."""
        self.number = number
        self._slots = slots
        self._max_step_tokens = max_step_tokens
        self._divides_prompts = divides_prompts

    def next_decodes(self, step: int, *, only_due: bool) -> Batch:
        """Return the decodes whose turn it is: those that were planned the longest ago, up to a step's part.

        `only_due`: leave out decodes whose last tokens are still being computed.
        """
        decodes = self._slots.decodes()
        if self.number == 1:
            return decodes
        if only_due:
            decodes = self._slots.due(decodes, step - self.number)
        most = -(-self._slots.num_running // self.number)
        return decodes if len(decodes.slots) <= most else self._slots.longest_waiting(decodes, most)

    def max_prompt_tokens(self, num_waiting_tokens: int, prefills: Iterable[Request]) -> int:
        """Return the maximum number of tokens of prompts in the next step.

        Args:
            num_waiting_tokens: number of tokens of all requests that wait.
            prefills: the running requests in the phase PREFILL.
        """
        most, computed = self._max_step_tokens, self._slots.computed
        if self.number == 1 or not self._divides_prompts:
            return most
        num_pending = num_waiting_tokens + sum(
            len(request.tokens) - int(computed[request.slot]) for request in prefills
        )
        return min(most, max(-(-num_pending // (_PARTS_OF_PROMPTS * self.number)), int(most * _LEAST_FRACTION), 1))
