"""Drafts by a head, which reads the target's hidden states.

The head's keys and values of a step's tokens are computed with the step, because the hidden states are needed for it.
That is one layer more for each of the head's. Everything else is computed only when tokens are drafted.

Layer l of a head, counted from 0, has an entry in the cache for each position p, made of the token at p + 1 and of the
output of layer l - 1 at p - 1. Of tokens that are known up to position n, entries up to n - 1 are computed with the
target's step. The draft that follows the first l of them needs the entries of layer l from n to n + l - 1: their tokens
are drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
from raycore.step.copies import to_device, to_device_together
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
        self.taps, self.wants_all_rows = self._states.taps, target_layers[-1] >= target.stage.layers.stop
        num_slots, num_more = len(batch.host.num_known), head.num_layers - 1
        self._hidden_SD = torch.zeros(num_slots, head.hidden_size, dtype=dtype, device=device)
        """By slot: what the head reads of the token before the newest one."""
        self._last_LSD = torch.zeros(num_more, num_slots, head.hidden_size, dtype=dtype, device=device)
        """By slot: the outputs of all layers but the last one at the last position that the target has computed."""
        self._passed: list[Tensor] = []
        """The outputs of these layers for the step's tokens."""
        self._fused_TD = self._hidden_SD[:0]
        """What the head reads of the step's tokens."""
        self._drafted_RD = self._hidden_SD[:0]
        """The head's output for the drafts' newest tokens."""
        self._drafted_RKD = self._drafted_RD[:, None]
        """The output of the layer that has made the newest drafts, for all drafts before these."""
        self._slots_R = torch.zeros(0, dtype=torch.int64, device=device)
        """The slots that are drafted for."""

    def parts(self) -> ProfiledParts:
        yield from self._head.parts()

    def apply(self, plan: StepPlan) -> None:
        """Forget what layers have returned for earlier requests of a slot: a cached prefix has keys and values alone.

        Hidden states come with a request's first step.
        """
        if len(self._last_LSD) and plan.new_requests:
            slots = np.array([request.slot for request in plan.new_requests])
            self._last_LSD.index_fill_(1, to_device(slots, self._batch.device), 0)

    def sync(self, step: StepInputs, tensors: StepTensors) -> None:
        """Computes the keys and values of the step's tokens."""
        num_rows = len(step.positions)
        self._fused_TD = self._head.fuse(self._states.of_step(num_rows))
        # of rows from which a token was sampled, this is the sampled one
        next_ids_T = self._batch.token_ids_at(tensors.indices_T[:num_rows] + 1)
        self._attention.begin(*_of_texts(step, tensors.first(num_rows)))
        inputs_TD, self._passed = self._fused_TD, []
        if len(self._last_LSD):
            inputs_TD = self._pass_on(step, next_ids_T)
        self._head.store(next_ids_T, inputs_TD, self._attention, self._head.num_layers - 1)

    def _pass_on(self, step: StepInputs, next_ids_T: Tensor) -> Tensor:
        """Compute all layers but the last one. Returns what that one reads."""
        ends = np.cumsum(step.counts)
        before = np.arange(-1, len(step.positions) - 1)
        before[ends - step.counts] = len(step.positions) + step.slots
        before_T, slots_S, last_S = to_device_together([before, step.slots, ends - 1], self._batch.device)
        inputs_TD = self._fused_TD
        for layer, last_SD in enumerate(self._last_LSD):
            out_TD = self._head.forward(next_ids_T, inputs_TD.clone(), self._attention, layer)
            inputs_TD = torch.cat([out_TD, last_SD]).index_select(0, before_T)
            # if drafts were wrong, `accept` takes those before
            last_SD.index_copy_(0, slots_S, out_TD.index_select(0, last_S))
            self._passed.append(out_TD)
        return inputs_TD

    def accept(self, step: StepInputs, rows: Ints) -> None:
        slots_R, rows_R = to_device_together([step.token_slots[rows], rows], self._batch.device)
        self._hidden_SD.index_copy_(0, slots_R, self._fused_TD.index_select(0, rows_R))
        for last_SD, out_TD in zip(self._last_LSD, self._passed, strict=True):
            last_SD.index_copy_(0, slots_R, out_TD.index_select(0, rows_R))

    def begin(self, rows: DraftRows) -> Tensor:
        self._slots_R = to_device(rows.slots, self._batch.device)
        self._drafted_RD = self._hidden_SD.index_select(0, self._slots_R)
        return self._compute(rows, len(rows.slots), rows.known - 1)

    def extend(self, rows: DraftRows, num_rows: int, offset: int) -> Tensor:
        layer = offset + 1
        if layer < self._head.num_layers:
            return self._descend(rows, num_rows, layer)
        return self._compute(rows, num_rows, rows.known + offset, self._head.num_layers - 1)

    def end(self, rows: DraftRows, drafts: list[list[int]]) -> None:
        """Do nothing: keys and values of drafts are computed again, from the target's hidden states."""

    def _compute(self, rows: DraftRows, num_rows: int, next_positions: Ints, layer: int = 0) -> Tensor:
        """Return the logits after the tokens at these positions, which are the head's inputs one position before."""
        starts = next_positions[:num_rows] - 1
        step, tensors = rows.step(np.arange(num_rows), starts, np.ones(num_rows, np.int64))
        self._threads.begin_layers(self._head, len(step.positions), step.num_keys)
        self._attention.begin(step, tensors)
        next_ids_R = self._batch.token_ids_at(tensors.next_indices_R)
        self._drafted_RD = self._head.forward(next_ids_R, self._drafted_RD[:num_rows], self._attention, layer)
        return self._head.logits(self._drafted_RD, layer)

    def _descend(self, rows: DraftRows, num_rows: int, layer: int) -> Tensor:
        """Return the logits after the first `layer` drafts, by that layer. It has as many entries to compute."""
        before_R1D = self._last_LSD[layer - 1].index_select(0, self._slots_R[:num_rows])[:, None]
        hidden_RKD = torch.cat([before_R1D, self._drafted_RKD[:num_rows]], dim=1) if layer > 1 else before_R1D
        step, tensors = rows.step(np.arange(num_rows), rows.known[:num_rows] - 1, np.full(num_rows, layer))
        self._threads.begin_layers(self._head, len(step.positions), step.num_keys)
        self._attention.begin(step, tensors)
        next_ids_T = self._batch.token_ids_at(tensors.indices_T + 1)
        hidden_TD = hidden_RKD.flatten(0, 1)
        self._drafted_RKD = self._head.forward(next_ids_T, hidden_TD, self._attention, layer).view_as(hidden_RKD)
        self._drafted_RD = self._drafted_RKD[:, -1].contiguous()
        return self._head.logits(self._drafted_RD, layer)


def _of_texts(step: StepInputs, tensors: StepTensors) -> tuple[StepInputs, StepTensors]:
    """Return a step whose tokens are those of texts: a head sees no images."""
    if step.features is None:
        return step, tensors
    return replace(step, features=None), replace(tensors, axes_T3=None, ends_T=None)
