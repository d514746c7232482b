"""What a stage does with its final hidden states: it samples from them, pools them, or sends them to the next stage.

`SamplingHead` and `PoolingHead` are in modules of their own. Shape suffixes: T tokens of a step, R those that are kept,
D hidden size.
"""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from raycore.messages import GrammarOutput
from raycore.parallel.links import Link
from raycore.profile_session import ProfiledParts
from raycore.runner.launched_step import LaunchedStep
from raycore.runner.part import RunnerPart
from raycore.step.batch import StepInputs
from raycore.step.device_batch import StepTensors


class Head(RunnerPart):
    """The end of a step."""

    def kept_rows(self, step: StepInputs, tensors: StepTensors) -> Tensor | None:
        """Return the rows that are kept. None: the first ones."""
        return tensors.sampled_rows_R

    @abstractmethod
    def take(
        self, step: StepInputs, tensors: StepTensors, hidden: Tensor, launched: LaunchedStep, *, has_all: bool
    ) -> None:
        """Go on with what the layers have computed. Adds what there is to report to `launched`.

        Args:
            hidden: all rows [T, D] that this worker computes, or those that are kept [R, D].
            has_all: whether it is all rows, because a part `wants_all_rows` or because workers divide the rows.
        """

    def sample(
        self, step: StepInputs, tensors: StepTensors, launched: LaunchedStep, grammar: GrammarOutput | None
    ) -> None:
        """Sample from what `take` has computed of the same step. Adds tokens and what belongs to them to `launched`.

        `grammar`: which tokens may come. None: those that the worker's own rules allow.
        """


class NextStage(Head):
    """Sends hidden states on."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def take(
        self, step: StepInputs, tensors: StepTensors, hidden: Tensor, launched: LaunchedStep, *, has_all: bool
    ) -> None:
        self._link.send(hidden)

    def parts(self) -> ProfiledParts:
        yield self._link, {"send": "send"}
