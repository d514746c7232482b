"""The tokens that the last stage of a pipeline samples, on their way back to the first stage, which computes them next.

So the engine can plan a decode before it has the result of the step before: the first stage waits for the token itself.
If workers draft, all earlier stages get the tokens: each then knows which drafts were right, and makes the same ones.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycore.messages import StepPlan
from raycore.parallel.links import Link
from raycore.step.batch import StepInputs
from raycore.step.device_batch import DeviceBatch, StepTensors
from raycore.step.verification import verify

_NONE = -1


class TokenReceiver:
    """The end of an earlier stage: takes sampled tokens, in the order of the steps, and adds them to the batch."""

    def __init__(self, link: Link, batch: DeviceBatch, max_steps: int, *, on_host: bool = False) -> None:
        """
        Args:
            on_host: whether the host needs the tokens, because they decide where the next step begins.
            max_steps: the maximum number of steps in flight. So when a step begins, the tokens of the one `max_steps`
                before it have been sent.
        """
        self._link = link
        self._batch = batch
        self._max_steps = max_steps
        self._on_host = on_host
        self._awaited: deque[tuple[StepInputs, Tensor]] = deque()
        """The steps whose tokens haven't been taken, oldest first, and where the tokens belong."""
        self._num_steps = 0
        self._last_step = np.full(len(batch.num_prompt), _NONE, np.int64)
        """By slot: the number of the last step that samples a token of its present request."""

    def take_for(self, plan: StepPlan) -> None:
        """Take the tokens that the step computes. Call this when the batch has applied the plan.

        Raises:
            OSError: tokens don't come in time, or the last stage is gone.
        """
        for request in plan.new_requests:
            self._last_step[request.slot] = _NONE
        last_needed = self._last_step[np.frombuffer(plan.slots, np.int32)].max(initial=_NONE)
        self._take_up_to(max(int(last_needed), self._num_steps - self._max_steps))

    def note(self, step: StepInputs, tensors: StepTensors) -> None:
        """Note which tokens the step samples. Later calls take them."""
        self._last_step[step.sampled_slots] = self._num_steps
        self._awaited.append((step, tensors.next_indices_R))
        self._num_steps += 1

    def finish(self) -> None:
        """Take the tokens of all steps that have begun.

        Raises:
            OSError: as in `take_for()`.
        """
        self._take_up_to(self._num_steps - 1)

    def _take_up_to(self, last: int) -> None:
        """Take the tokens of the steps up to number `last`."""
        while self._num_steps - len(self._awaited) <= last:
            step, indices_R = self._awaited.popleft()
            if len(step.sampled):
                token_ids_R = torch.empty(len(step.sampled), dtype=torch.int32, device=indices_R.device)
                self._batch.append_later(step, indices_R, self._link.receive_into(token_ids_R))
                if self._on_host:
                    self._verify(step, token_ids_R.cpu().numpy())

    def _verify(self, step: StepInputs, sampled_ids: NDArray[np.int32]) -> None:
        """Note a step's tokens on the host, and which of its drafts were right."""
        self._batch.receive(step, sampled_ids)
        if step.draft_ids is not None:
            self._batch.host.drop_drafts(step, verify(step, sampled_ids).counts)
