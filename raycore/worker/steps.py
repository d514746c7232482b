"""What a worker says of its steps besides their results. Does not import torch."""

from __future__ import annotations

from typing import NamedTuple

from raycore.messages import StepResult
from raycore.rpc.pending import Pending


class WorkerTimes(NamedTuple):
    """What a worker has spent its time on in all its steps so far, in seconds of the host."""

    computing_s: float
    link_s: float
    """Waiting for the worker of the stage before, or of the next one."""

    def plus(self, computing_s: float, link_s: float) -> WorkerTimes:
        """Return these times and those of another step."""
        return WorkerTimes(self.computing_s + computing_s, self.link_s + link_s)


class Unreported:
    """A pending step whose tokens another worker reports."""

    def __init__(self, step: Pending[StepResult]) -> None:
        self._step = step

    def done(self) -> bool:
        """Whether `result()` would return at once."""
        return self._step.done()

    def result(self, timeout: float | None = None) -> StepResult | None:
        """Wait for what this worker's parts report. None: nothing.

        Raises:
            TimeoutError: the step takes longer than `timeout` seconds.
        """
        result = self._step.result(timeout)  # the worker itself needs it: its grammars follow the tokens
        return StepResult(result.step, reports=result.reports) if result.reports else None
