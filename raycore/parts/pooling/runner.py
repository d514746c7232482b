"""Makes results of final hidden states, on the last stage of a model that pools.

Shape suffixes: T tokens of a step, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Container

import numpy as np
import torch
from torch import Tensor

from raycore.messages import StepPlan, StepResult
from raycore.parts.pooling.layers.pooler import PooledDownload, Pooler
from raycore.parts.pooling.models.pooling import PoolingSpec
from raycore.runner.heads import Head
from raycore.runner.launched_step import LaunchedStep
from raycore.step.batch import Ints, SlotBatch, StepInputs
from raycore.step.copies import Download, to_device
from raycore.step.device_batch import DeviceBatch, StepTensors


def seen_tokens(pooling: PoolingSpec | None, host: SlotBatch) -> Callable[[StepInputs], Ints] | None:
    """Return what counts how many of a prompt's first tokens others see, in an encoder. None: they see all."""
    late = None if pooling is None else pooling.late
    if late is None or late.expansion_token is None or late.attends_to_expansion:
        return None

    def count(step: StepInputs) -> Ints:
        prompts = zip(step.slots.tolist(), step.counts.tolist(), strict=True)
        return np.array([late.num_seen(host.token_ids[slot, :num].tolist()) for slot, num in prompts])

    return count


class PoolingHead(Head):
    """Makes results of hidden states."""

    def __init__(self, pooler: Pooler, batch: DeviceBatch) -> None:
        self._pooler = pooler
        self._batch = batch

    def apply(self, plan: StepPlan) -> None:
        self._pooler.apply(plan)

    def wants_all_rows(self, step: StepInputs) -> bool:
        return self._pooler.wants_all_rows(step.slots)

    def kept_rows(self, step: StepInputs, tensors: StepTensors) -> Tensor | None:
        if self._pooler.takes_first_tokens:
            return to_device(step.first_rows, tensors.slots_T.device)
        return tensors.sampled_rows_R

    def take(
        self, step: StepInputs, tensors: StepTensors, hidden: Tensor, launched: LaunchedStep, *, has_all: bool
    ) -> None:
        """Pool. Each result comes with a token, which means nothing."""
        hidden_TD = hidden if has_all else None
        kept = None if hidden_TD is None else self.kept_rows(step, tensors)
        if kept is not None:
            hidden = hidden.index_select(0, kept)
        download = self._pooler.start(step, self._batch.host.token_ids, hidden_TD, hidden)
        if download is not None:
            launched.extras.append(_PooledResults(download))
        if len(step.sampled):
            launched.token_ids = Download([torch.zeros(len(step.sampled), dtype=torch.int64, device=hidden.device)])


class _PooledResults:
    """Implements `StepExtra`."""

    def __init__(self, download: PooledDownload) -> None:
        self._download = download

    def add_to(self, result: StepResult, step: StepInputs, kept: Container[int]) -> None:
        result.pooled = self._download.entries()
