"""The contract between a model runner and what takes part in its steps.

Adapters, drafts, images, states, ranks that share experts and the stages of a pipeline are parts. A part overrides some
of the hooks of `RunnerPart`, whose own methods do nothing. The runner binds these once, so a step costs nothing for
parts that have nothing to do in it.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Protocol

from raycore.decoder.network import NO_TAPS, FollowsPlans, Taps
from raycore.messages import StepPlan, StepResult
from raycore.profile_session import ProfiledParts
from raycore.step.batch import Ints, StepInputs
from raycore.step.device_batch import StepTensors


class StepExtra(Protocol):
    """What a step reports besides tokens, on its way from the device."""

    def add_to(self, result: StepResult, step: StepInputs, kept: Container[int]) -> None:
        """Wait for it, and add it to the step's result: to `StepResult.reports`, if it is about tokens of requests.

        `kept`: which of the new tokens their requests get, as indexes in `StepInputs.sampled`. A stage that samples
        none doesn't know them.
        """
        ...


class PendingStep(Protocol):
    """A step that the device has been given."""

    def result(self) -> StepResult:
        """Wait for the step's result, and note it in the batch. To be called for one step after the other."""
        ...


class RunnerPart:
    """Takes part in steps. Its hooks are called in the order of the runner's parts, and in the order in which they are
    here."""

    def catch_up(self) -> None:
        """Do what needs the results of earlier steps, before the next plan is applied."""

    def apply(self, plan: StepPlan) -> None:
        """Apply a plan's freed slots and new requests, in this order. The batch has applied them."""

    def begin(self, plan: StepPlan, step: StepInputs, tensors: StepTensors, result: StepResult) -> None:
        """Do what comes before the layers, also in a step without tokens.

        `result`: the step's, as far as it is known.
        """

    def wants_all_rows(self, step: StepInputs) -> bool:
        """Whether the last layer computes all tokens of the step. If no part wants that, it keeps some."""
        return False

    def begin_forward(self, step: StepInputs, tensors: StepTensors) -> None:
        """Prepare for the layers of a step that has tokens."""

    def taps(self, step: StepInputs) -> Taps:
        """Return what reads or changes hidden states between layers. At most one part of a runner has any in a step."""
        return NO_TAPS

    def end_forward(self, step: StepInputs, tensors: StepTensors, extras: list[StepExtra]) -> None:
        """Catch up with a step that had tokens. Its new tokens have been sampled, but may be on the device.

        `extras`: gets what the part reports with the step.
        """

    def launched(self, step: PendingStep) -> None:
        """Note a step that the device has been given."""

    def received(self, step: StepInputs, rows: Ints) -> None:
        """Note that a step's new tokens have arrived.

        `rows`: of the step's tokens, those that come before their slots' newest tokens.
        """

    def finish(self) -> None:
        """Take what others have sent, after the last step. Raises OSError if they are stuck or gone."""

    def parts(self) -> ProfiledParts:
        """Return the parts of a step, for profiles."""
        return ()


class PlanFollower(RunnerPart):
    """A part that is also another object: layers that keep states, or an encoder's token types."""

    def __init__(self, follower: FollowsPlans) -> None:
        self._follower = follower

    def apply(self, plan: StepPlan) -> None:
        self._follower.apply(plan)
