"""The tokens that the last stage of a pipeline samples, on their way back to the first stage, which computes them next.

So the engine can plan a decode before it has the result of the step before: the first stage waits for the token itself.
If workers draft, all earlier stages get the tokens: each then knows which drafts were right, and makes the same ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycore.messages import StepPlan
from raycore.parallel.links import Link
from raycore.step.batch import Ints, StepInputs
from raycore.step.device_batch import DeviceBatch, StepTensors
from raycore.step.verification import verify

_NONE = -1

TakeDrafts = Callable[[Ints, NDArray[np.int32]], None]
"""Gets slots, and for each of them the length of its draft and its tokens, int32[n, 1 + k]."""


class DraftedSlots(NamedTuple):
    """The slots that get drafts after a step."""

    slots: Ints
    generations: Ints
    """See `SlotBatch.generation`."""


_NO_SLOTS = DraftedSlots(np.zeros(0, np.int64), np.zeros(0, np.int64))


class TokenReceiver:
    """The end of an earlier stage: takes sampled tokens, in the order of the steps, and adds them to the batch."""

    def __init__(
        self,
        link: Link,
        batch: DeviceBatch,
        max_steps: int,
        *,
        on_host: bool = False,
        max_drafts: int = 0,
        take_drafts: TakeDrafts = lambda slots, table: None,
    ) -> None:
        """
        Args:
            on_host: whether the host needs the tokens, because they decide where the next step begins.
            max_drafts: maximum length of a draft.
            take_drafts: gets drafts that the last stage makes after a step.
            max_steps: the maximum number of steps in flight. So when a step begins, the tokens of the one `max_steps`
                before it have been sent.
        """
        self._link = link
        self._batch = batch
        self._max_steps = max_steps
        self._on_host = on_host
        self._max_drafts = max_drafts
        self._take_drafts = take_drafts
        self._awaited: deque[tuple[StepInputs, Tensor, DraftedSlots]] = deque()
        """The steps whose tokens haven't been taken, oldest first, where the tokens belong, and what drafts follow."""
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

    def note(self, step: StepInputs, tensors: StepTensors, next_drafts: bytes = b"") -> None:
        """Note which tokens the step samples, and the plan's `next_drafts`. Later calls take them."""
        self._last_step[step.sampled_slots] = self._num_steps
        drafted = _NO_SLOTS
        if next_drafts:
            slots = step.slots[np.frombuffer(next_drafts, np.int32) > 0]
            drafted = DraftedSlots(slots, self._batch.host.generation[slots])
        self._awaited.append((step, tensors.next_indices_R, drafted))
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
            step, indices_R, drafted = self._awaited.popleft()
            if len(step.sampled):
                token_ids_R = torch.empty(len(step.sampled), dtype=torch.int32, device=indices_R.device)
                self._batch.append_later(step, indices_R, self._link.receive_into(token_ids_R))
                if self._on_host:
                    self._verify(step, token_ids_R.cpu().numpy())
            if len(drafted.slots):
                self._receive_drafts(drafted, indices_R.device)

    def _receive_drafts(self, drafted: DraftedSlots, device: torch.device) -> None:
        """Take the drafts that follow a step's tokens, without those of requests that have lost their slots since."""
        table = torch.empty(len(drafted.slots), 1 + self._max_drafts, dtype=torch.int32, device=device)
        drafts = self._link.receive_into(table).cpu().numpy()
        is_current = self._batch.host.generation[drafted.slots] == drafted.generations
        self._take_drafts(drafted.slots[is_current], drafts[is_current])

    def _verify(self, step: StepInputs, sampled_ids: NDArray[np.int32]) -> None:
        """Note a step's tokens on the host, and which of its drafts were right."""
        self._batch.receive(step, sampled_ids)
        if step.draft_ids is not None:
            self._batch.host.drop_drafts(step, verify(step, sampled_ids).counts)
