"""Drafts by a head, which reads the target's hidden states.

The head's keys and values of a step's tokens are computed with the step, because the hidden states are needed for it.
That is one layer more. Everything else is computed only when tokens are drafted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from raycore.attention.spec import Attention
from raycore.decoder.network import Network
from raycore.messages import StepPlan
from raycore.parallel.links import Link
from raycore.parts.drafts.decoder.head import DraftingHead
from raycore.parts.drafts.runner.rows import DraftRows
from raycore.parts.drafts.runner.stage_states import StageStates
from raycore.profile_session import ProfiledParts
from raycore.runner.compute_threads import ComputeThreads
from raycore.runner.rows import StepRows
from raycore.step.batch import Ints, StepInputs
from raycore.step.copies import to_device_together
from raycore.step.device_batch import DeviceBatch, StepTensors


class HeadDrafts:
    """Implements `DraftNetwork`."""

    def __init__(
        self,
        head: DraftingHead,
        target: Network,
        target_layers: list[int],
        attention: Attention,
        batch: DeviceBatch,
        rows: StepRows,
        threads: ComputeThreads,
        *,
        max_step_tokens: int,
        links: Sequence[Link] = (),
    ) -> None:
        """
        Args:
            target_layers: what the head reads of the target, as `Taps` number it.
            attention: the head's, with blocks that have the same numbers as the target's.
            rows: which rows of the target's layers this worker computes. Those of the head it computes all.
            max_step_tokens: the largest number of rows of the target's steps, padding included.
            links: from the stage before, if there is one.
        """
        self._head = head
        self._attention = attention
        self._batch = batch
        self._threads = threads
        dtype, device = target.dtype, batch.device
        self._states = StageStates(target, target_layers, links, rows, max_step_tokens, device)
        self.taps, self.wants_all_rows = self._states.taps, target.stage.layers.stop in target_layers
        self._hidden_SD = torch.zeros(len(batch.host.num_known), head.hidden_size, dtype=dtype, device=device)
        """By slot: what the head reads of the token before the newest one."""
        self._fused_TD = self._hidden_SD[:0]
        """What the head reads of the step's tokens."""
        self._drafted_RD = self._hidden_SD[:0]
        """The head's output for the drafts' newest tokens."""

    def parts(self) -> ProfiledParts:
        yield from self._head.parts()

    def apply(self, plan: StepPlan) -> None:
        """Do nothing: new requests bring hidden states with their first step."""

    def sync(self, step: StepInputs, tensors: StepTensors) -> None:
        """Computes the keys and values of the step's tokens."""
        num_rows = len(step.positions)
        self._fused_TD = self._head.fuse(self._states.of_step(num_rows))
        # of rows from which a token was sampled, this is the sampled one
        next_ids_T = self._batch.token_ids_at(tensors.indices_T[:num_rows] + 1)
        self._attention.begin(step, tensors.first(num_rows))
        self._head.store(next_ids_T, self._fused_TD, self._attention)

    def accept(self, step: StepInputs, rows: Ints) -> None:
        slots_R, rows_R = to_device_together([step.token_slots[rows], rows], self._batch.device)
        self._hidden_SD.index_copy_(0, slots_R, self._fused_TD.index_select(0, rows_R))

    def begin(self, rows: DraftRows) -> Tensor:
        (slots_R,) = to_device_together([rows.slots], self._batch.device)
        self._drafted_RD = self._hidden_SD.index_select(0, slots_R)
        return self._compute(rows, len(rows.slots), rows.known - 1)

    def extend(self, rows: DraftRows, num_rows: int, offset: int) -> Tensor:
        return self._compute(rows, num_rows, rows.known + offset)

    def end(self, rows: DraftRows, drafts: list[list[int]]) -> None:
        """Do nothing: keys and values of drafts are computed again, from the target's hidden states."""

    def _compute(self, rows: DraftRows, num_rows: int, next_positions: Ints) -> Tensor:
        """Return the logits after the tokens at these positions, which are the head's inputs one position before."""
        starts = next_positions[:num_rows] - 1
        step, tensors = rows.step(np.arange(num_rows), starts, np.ones(num_rows, np.int64))
        self._threads.begin_layers(self._head, len(step.positions), step.num_keys)
        self._attention.begin(step, tensors)
        next_ids_R = self._batch.token_ids_at(tensors.next_indices_R)
        self._drafted_RD = self._head.forward(next_ids_R, self._drafted_RD[:num_rows], self._attention)
        return self._head.logits(self._drafted_RD)
