"""Where a stage's inputs come from: tokens, tokens with images or given embeddings, or the stage before.

Shape suffixes: T rows of the step that this worker computes, D hidden size.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from raycore.decoder.network import NO_TAPS, Network, Taps
from raycore.messages import StepPlan, StepResult
from raycore.parallel.links import Link
from raycore.parts.images.runner import StepImages
from raycore.profile_session import ProfiledParts
from raycore.runner.compute_threads import ComputeThreads
from raycore.runner.part import RunnerPart
from raycore.runner.rows import ALL_ROWS, StepRows
from raycore.step.batch import StepInputs
from raycore.step.device_batch import DeviceBatch, StepTensors


class Source(RunnerPart):
    """What the first of a stage's layers gets."""

    def wait(self, step: StepInputs, tensors: StepTensors) -> None:
        """Wait for what comes from elsewhere, before the step's time begins: compute threads shouldn't wait in it."""

    @abstractmethod
    def read(self, step: StepInputs, tensors: StepTensors) -> Tensor:
        """Return what `Network.forward` takes: tokens [T], or hidden states [T, D]."""


class Tokens(Source):
    """The tokens of sequences."""

    def __init__(self, batch: DeviceBatch, rows: StepRows = ALL_ROWS) -> None:
        self._batch = batch
        self._rows = rows

    def read(self, step: StepInputs, tensors: StepTensors) -> Tensor:
        return self._rows.own(self._batch.token_ids_of(tensors))


class TokensWithImages(Source):
    """Tokens, with embeddings of images, or of prompts, in the place of some."""

    def __init__(
        self,
        images: StepImages,
        batch: DeviceBatch,
        network: Network,
        threads: ComputeThreads,
        rows: StepRows = ALL_ROWS,
    ) -> None:
        self.images = images
        self._batch = batch
        self._network = network
        self._threads = threads
        self._rows = rows

    def begin(self, plan: StepPlan, step: StepInputs, tensors: StepTensors, result: StepResult) -> None:
        """Encode images, and drop embeddings."""
        if plan.encoder is not None:
            self._threads.begin_step(self.images.num_patches(plan.encoder), self.images.num_weights)
            self.images.apply(plan.encoder)
            self._threads.adapt()

    def taps(self, step: StepInputs) -> Taps:
        if step.features is None or not step.features.rows:
            return NO_TAPS
        taps = self.images.deepstack(step.features.rows)
        if not self._rows.is_divided:
            return taps
        return {layer: partial(self._add_own, add, len(step.positions)) for layer, add in taps.items()}

    def _add_own(self, add: Callable[[Tensor], None], num_rows: int, own_TD: Tensor) -> None:
        """Add to this worker's rows what `add` adds to all."""
        added_TD = own_TD.new_zeros(num_rows, own_TD.shape[1])
        add(added_TD)
        own_TD += self._rows.own(added_TD)

    def read(self, step: StepInputs, tensors: StepTensors) -> Tensor:
        token_ids_T = self._batch.token_ids_of(tensors)
        if step.features is None or not step.features.rows:
            return self._rows.own(token_ids_T)
        return self._rows.own(self.images.merged(self._network.vocabulary.embed(token_ids_T), step.features.rows))

    def parts(self) -> ProfiledParts:
        return self.images.parts()


class StageBefore(Source):
    """Hidden states from the stage before."""

    def __init__(self, link: Link, rows: StepRows, network: Network) -> None:
        self._link = link
        self._rows = rows
        self._network = network
        self._received: list[Tensor] = []

    def wait(self, step: StepInputs, tensors: StepTensors) -> None:
        self._receive(step, tensors)

    def _receive(self, step: StepInputs, tensors: StepTensors) -> None:
        num_rows = self._rows.count(step) if self._rows.is_divided else len(tensors.slots_T)
        shape = (num_rows, self._network.hidden_size)
        hidden_TD = torch.empty(shape, dtype=self._network.dtype, device=tensors.slots_T.device)
        self._received = [self._link.receive_into(hidden_TD)]

    def read(self, step: StepInputs, tensors: StepTensors) -> Tensor:
        return self._received.pop()

    def parts(self) -> ProfiledParts:
        yield self, {"_receive": "receive"}
