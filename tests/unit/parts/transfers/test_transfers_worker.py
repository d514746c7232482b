"""What a worker's side of a connector reports, and with which steps."""

from __future__ import annotations

from typing import Any

from raycore.messages import DUMMY_STEP, StepPlan, StepResult
from raycore.parts.transfers.connectors.connector import WorkerConnector
from raycore.parts.transfers.worker import WorkerTransfers


class Loading(WorkerConnector):
    """Has loaded request 7."""

    done = (7,)

    def register_kv_caches(self, caches: Any) -> None: ...

    def start_load_kv(self, plan: StepPlan) -> None: ...

    def get_finished(self) -> tuple[list[int], list[int]]:
        done, self.done = self.done, ()
        return [], list(done)


class Finished:
    """A step that is over."""

    def __init__(self, number: int) -> None:
        self._number = number

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> StepResult:
        return StepResult(self._number)


def test_steps_that_the_scheduler_does_not_know_of_report_nothing() -> None:
    core: Any = None
    part = WorkerTransfers(core)
    part.connector = Loading()
    reports: list[Any] = []
    for number in (DUMMY_STEP, 3):
        plan = StepPlan(number)
        part.begin(plan)
        reports.append(part.end(plan, Finished(number)).result())
    assert reports[0].transfer is None
    assert reports[1].transfer.received == [7]
