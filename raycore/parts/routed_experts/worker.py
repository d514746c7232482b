"""Notes which experts the routers of a worker's layers choose, and reports them with each step.

Shape suffixes: T tokens of a step, S sparse layers of the stage, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
from torch import Tensor

from raycore.config import EngineConfig
from raycore.messages import StepResult, TokenReport
from raycore.parts.experts.layers.sparse_feed_forward import SparseFeedForward
from raycore.parts.routed_experts.models import NAME, ExpertRows
from raycore.runner.part import RunnerPart, StepExtra
from raycore.step.batch import StepInputs
from raycore.step.copies import Download
from raycore.step.device_batch import StepTensors
from raycore.worker.part import WorkerPart


class RoutedExpertsOfWorker(WorkerPart):
    """Has the runner note experts. Graphs, which repeat what is on the device alone, would leave that out."""

    option = "enable_return_routed_experts=True"

    @classmethod
    def is_needed(cls, config: EngineConfig) -> bool:
        return config.routed_experts.enable_return_routed_experts

    def runner_parts(self) -> Sequence[RunnerPart]:
        """Note experts on the first worker of each stage: the others of the stage choose the same."""
        rank, model = self.core.rank, self.core.model
        is_small = ExpertRows.of(self.core.config.model.spec).dtype.itemsize == 1
        dtype = torch.uint8 if is_small else torch.uint16
        return [ChosenExperts(model.network.sparse_layers, dtype)] if rank.tp_rank == 0 else [AllRowsToo()]

    def acts_in_layers(self) -> bool:
        return True


class AllRowsToo(RunnerPart):
    """Has the last layer compute all tokens, of which its router chooses the experts."""

    def wants_all_rows(self, step: StepInputs) -> bool:
        return True


class ChosenExperts(AllRowsToo):
    """Collects the experts of a step's tokens, layer after layer."""

    def __init__(self, layers: Sequence[SparseFeedForward], dtype: torch.dtype) -> None:
        """`layers`: those of the stage that have experts. `dtype`: of ids."""
        self._dtype = dtype
        self._ids: list[Tensor] = []
        for layer in layers:
            layer.note_choices(self._note)

    def _note(self, ids_TK: Tensor) -> None:
        self._ids.append(ids_TK.to(self._dtype))

    def begin_forward(self, step: StepInputs, tensors: StepTensors) -> None:
        self._ids = []  # without what was computed only for other engines

    def end_forward(self, step: StepInputs, tensors: StepTensors, extras: list[StepExtra]) -> None:
        ids, self._ids = self._ids, []
        if ids:
            extras.append(_ExpertsDownload(Download([torch.stack(ids, dim=1)])))


class _ExpertsDownload:
    """Experts on their way to the host. Implements `StepExtra`."""

    def __init__(self, ids_TSK: Download) -> None:
        self._ids_TSK = ids_TSK

    def add_to(self, result: StepResult, step: StepInputs, kept: Container[int]) -> None:
        """Report the experts of each request's tokens, wrong drafts included."""
        (ids_TSK,) = self._ids_TSK.arrays()
        first = 0
        for index, (position, count) in enumerate(zip(step.starts.tolist(), step.counts.tolist(), strict=True)):
            data = ids_TSK[first : first + count].tobytes()
            result.reports.append((index, TokenReport(NAME, position, count, data)))
            first += count
