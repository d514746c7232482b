"""A step that the device has been given, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from raycore.messages import StepResult
from raycore.runner.part import StepExtra
from raycore.step.batch import Ints, StepInputs
from raycore.step.copies import Download
from raycore.step.device_batch import DeviceBatch
from raycore.step.verification import verify

Received = Callable[[StepInputs, Ints], None]
"""See `RunnerPart.received`."""


@dataclass(slots=True)
class LaunchedStep:
    """Implements `Pending`."""

    result_so_far: StepResult
    """Without what has to come from the device: tokens and extras."""
    step: StepInputs
    batch: DeviceBatch
    received: Sequence[Received] = ()
    """What notes the new tokens."""
    token_ids: Download | None = None
    """The sampled tokens. None: the step samples none."""
    extras: list[StepExtra] = field(default_factory=list[StepExtra])
    is_complete: bool = False
    """Whether `result_so_far` is the result."""

    def done(self) -> bool:
        """Whether the device has finished the step."""
        return self.token_ids is None or self.token_ids.done()

    def result(self, timeout: float | None = None) -> StepResult:
        """Wait for the step's result, and note it in the batch. To be called for one step after the other.

        Raises:
            TimeoutError: the device hasn't finished within `timeout` seconds.
        """
        step, result = self.step, self.result_so_far
        if self.is_complete:
            return result
        if self.token_ids is not None:
            self.token_ids.wait(timeout)
            (sampled_ids,) = self.token_ids.arrays()
            self.batch.receive(step, sampled_ids)
            if step.is_decoding:
                result.token_ids = sampled_ids.astype(np.int32).tobytes()
                self._add_extras(range(len(sampled_ids)))
                self._note(step.sampled_rows)
            else:
                new = verify(step, sampled_ids)
                if step.draft_ids is not None:
                    self.batch.host.drop_drafts(step, new.counts)
                    result.num_drafts = step.num_drafts.astype(np.int32).tobytes()
                result.token_ids = sampled_ids[new.rows].astype(np.int32).tobytes()
                result.num_tokens = new.counts.astype(np.int32).tobytes()
                self._add_extras(set(new.rows.tolist()))
                last_of_each = np.cumsum(new.counts[new.counts > 0]) - 1
                self._note(step.sampled_rows[new.rows[last_of_each]])
        elif len(step.slots):
            result.num_tokens = np.zeros(len(step.slots), np.int32).tobytes()
            self._add_extras(())
        self.is_complete = True
        return result

    def _add_extras(self, kept: range | set[int] | tuple[()]) -> None:
        for extra in self.extras:
            extra.add_to(self.result_so_far, self.step, kept)

    def _note(self, rows: Ints) -> None:
        for received in self.received:
            with torch.inference_mode():
                received(self.step, rows)
