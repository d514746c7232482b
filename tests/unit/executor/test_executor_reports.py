"""A step's result has the reports of all workers, in the order of their ranks."""

from __future__ import annotations

from raycore.executor.reports import ReportsOfAll
from raycore.messages import StepResult, TokenReport


def test_reports_of_all_workers_are_in_the_order_of_ranks() -> None:
    a, b, c = ((index, TokenReport(name, 3, 1, b"0")) for index, name in enumerate("abc"))
    outputs = [StepResult(3, reports=[a, b]), None, StepResult(3, b"1", reports=[c]), None]
    assert ReportsOfAll().aggregate(outputs, output_rank=2) == StepResult(3, b"1", reports=[a, b, c])
