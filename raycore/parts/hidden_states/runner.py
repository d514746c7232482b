"""The final hidden states that requests ask for: those of their prompts, and those that tokens are sampled from.

Shape suffixes: T tokens of a step, R new tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from raycore.messages import StepPlan, StepResult, TokenReport
from raycore.parts.hidden_states.values import NAME
from raycore.step.batch import Ints, StepInputs
from raycore.step.copies import Download, to_device


@dataclass(slots=True)
class StatesDownload:
    """A step's hidden states on their way to the host. Implements `StepExtra`."""

    sampled: Ints
    """For each new token whose state is returned, ascending: its index in `StepInputs.sampled`."""
    states: Download
    """float32[len(sampled), D]"""
    prompts: list[tuple[int, int, Download]] = field(default_factory=list[tuple[int, int, Download]])
    """(index in `StepInputs.slots`, first position, float32[n, D]: the states of n positions of the prompt)."""

    def add_to(self, result: StepResult, step: StepInputs, kept: Container[int]) -> None:
        """Wait for the states, and add them to a step's result.

        `kept`: which of the new tokens, as indexes in `StepInputs.sampled`, their requests get.
        """
        (states,) = self.states.arrays()
        for row, state in zip(self.sampled.tolist(), states, strict=True):
            if row in kept:
                position = int(step.next_positions[row]) - 1
                result.reports.append((int(step.sampled[row]), TokenReport(NAME, position, 1, state.tobytes())))
        for index, first, download in self.prompts:
            (states,) = download.arrays()
            result.reports.append((index, TokenReport(NAME, first, len(states), states.tobytes())))


class ReturnedStates:
    """Knows which running requests ask for hidden states."""

    def __init__(self) -> None:
        self._of_output: set[int] = set()
        """The slots of requests with `return_hidden_states`."""
        self._of_prompt: set[int] = set()

    def apply(self, plan: StepPlan) -> None:
        """Apply the plan's freed slots and new requests, in this order."""
        if self._of_output or self._of_prompt:
            self._of_output.difference_update(plan.freed_slots)
            self._of_prompt.difference_update(plan.freed_slots)
        for new in plan.new_requests:
            if new.params.return_hidden_states:
                self._of_output.add(new.slot)
            if new.params.return_prompt_hidden_states:
                self._of_prompt.add(new.slot)

    def wants_prompts(self, slots: Ints) -> bool:
        """Whether a request among `slots` asks for its prompt's states."""
        return bool(self._of_prompt) and not self._of_prompt.isdisjoint(slots.tolist())

    def start(
        self, step: StepInputs, num_prompt: Ints, hidden_TD: Tensor | None, hidden_RD: Tensor
    ) -> StatesDownload | None:
        """Start to bring a step's states to the host. None: no request asks for any.

        Args:
            num_prompt: by slot, the number of tokens of the prompt.
            hidden_TD: the states of all tokens. None: those from which no token is sampled weren't computed to the end.
            hidden_RD: those that tokens are sampled from.
        """
        if not (self._of_output or self._of_prompt):
            return None
        sampled = np.flatnonzero(np.isin(step.sampled_slots, list(self._of_output)))
        own_RD = hidden_RD[:0] if not len(sampled) else hidden_RD.index_select(0, to_device(sampled, hidden_RD.device))
        download = StatesDownload(sampled, Download([own_RD.float()]))
        if hidden_TD is not None:
            first_rows = step.first_rows
            for index, slot in enumerate(step.slots.tolist()):
                first, count = int(step.starts[index]), int(step.counts[index])
                num = min(count, int(num_prompt[slot]) - first)
                if slot in self._of_prompt and num > 0:
                    row = int(first_rows[index])
                    download.prompts.append((index, first, Download([hidden_TD[row : row + num].float()])))
        return download
