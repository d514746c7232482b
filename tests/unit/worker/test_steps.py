"""What a worker says of its steps, and what it runs before the first one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from caches import cache_of
from test_setup import make
from test_worker import start

from raycore.messages import StepPlan, StepResult, TokenReport
from raycore.worker.steps import Unreported, WorkerTimes
from raycore.worker.warm_up import warm_up_plans


class Step:
    def __init__(self, reports: Sequence[tuple[int, TokenReport]] = ()) -> None:
        self.timeouts: list[float | None] = []
        self.reports = list(reports)

    def done(self) -> bool:
        return bool(self.timeouts)

    def result(self, timeout: float | None = None) -> StepResult:
        self.timeouts.append(timeout)
        return StepResult(5, b"tokens", reports=self.reports)


def test_a_worker_that_does_not_report_waits_for_its_step_and_returns_no_result() -> None:
    step = Step()
    pending = Unreported(step)
    assert not pending.done()
    assert pending.result(3.0) is None
    assert step.timeouts == [3.0]
    assert pending.done()


def test_a_worker_whose_parts_report_returns_only_that() -> None:
    reports = [(0, TokenReport("a", 3, 1, b"1"))]
    assert Unreported(Step(reports)).result() == StepResult(5, reports=reports)


def test_step_times_are_added_up() -> None:
    assert WorkerTimes(1.0, 2.0).plus(0.5, 0.25) == (1.5, 2.25)


@pytest.mark.parametrize(("block_size", "max_model_len", "num_tokens"), [(16, 64, 7), (4, 64, 3), (16, 2, 1)])
def test_warm_up_steps_fit_into_a_block_and_end_their_request(
    tmp_path: Path, block_size: int, max_model_len: int, num_tokens: int
) -> None:
    plans = warm_up_plans(make(tmp_path, block_size=block_size, max_model_len=max_model_len), num_groups=1)
    assert [plan.step for plan in plans] == [-3, -2, -1]
    (request,) = plans[0].new_requests
    assert len(np.frombuffer(request.token_ids, np.int32)) == plans[0].num_step_tokens == num_tokens
    assert plans[-1].freed_slots == [0]


def test_a_worker_counts_the_time_of_its_steps(tmp_path: Path) -> None:
    make(tmp_path)
    worker = start(str(tmp_path))
    worker.initialize_cache(cache_of(worker, 1))
    worker.execute_model(StepPlan(0))
    first = worker.step_times()
    worker.execute_model(StepPlan(1))
    assert 0 < first.computing_s < worker.step_times().computing_s
    assert worker.step_times().link_s == 0
    worker.shutdown()
