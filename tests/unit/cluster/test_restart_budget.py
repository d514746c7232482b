"""A process that fails is restarted at once, then later and later, and finally not at all."""

from __future__ import annotations

from raycore.cluster.restart_budget import RestartBudget
from raycore.config import RecoveryConfig


def test_the_delay_before_a_restart_has_an_upper_limit():
    budget = RestartBudget(RecoveryConfig(max_rank_restarts=9, restart_backoff_s=1.0, max_restart_backoff_s=3.0))
    assert [budget.next_delay_s(now_s) for now_s in range(5)] == [0.0, 1.0, 2.0, 3.0, 3.0]


def test_no_restart_is_allowed_with_max_rank_restarts_0():
    assert RestartBudget(RecoveryConfig(max_rank_restarts=0)).next_delay_s(0.0) is None


def test_a_failure_at_the_end_of_the_crash_loop_needs_no_delay():
    budget = RestartBudget(RecoveryConfig(restart_backoff_s=1.0, crash_loop_s=10.0))
    assert [budget.next_delay_s(now_s) for now_s in (0.0, 10.0, 19.9)] == [0.0, 0.0, 1.0]


def test_a_restart_counts_from_when_its_delay_is_over():
    limits = {"restart_backoff_s": 20.0, "max_restart_backoff_s": 30.0, "crash_loop_s": 10.0}
    budget = RestartBudget(RecoveryConfig(**limits))
    assert [budget.next_delay_s(now_s) for now_s in (0.0, 1.0)] == [0.0, 20.0]
    assert budget.next_delay_s(25.0) == 20.0, "it was restarted 4 s ago"


def test_a_crash_loop_may_be_longer_than_the_window():
    limits = {"restart_window_s": 10.0, "restart_backoff_s": 1.0, "crash_loop_s": 100.0, "max_rank_restarts": 2}
    budget = RestartBudget(RecoveryConfig(**limits))
    assert [budget.next_delay_s(now_s) for now_s in (0.0, 20.0, 40.0, 200.0)] == [0.0, 1.0, 2.0, 0.0]


def test_restarts_within_the_window_are_counted_and_spaced():
    limits = {"max_rank_restarts": 5, "restart_window_s": 100, "restart_backoff_s": 1.0, "crash_loop_s": 10}
    budget = RestartBudget(RecoveryConfig(**limits))
    assert [budget.next_delay_s(now_s) for now_s in (0, 1, 2, 3)] == [0.0, 1.0, 2.0, 4.0]
    assert budget.next_delay_s(50) == 0.0, "it has run for a while"
    assert budget.next_delay_s(99) is None
    assert budget.next_delay_s(100.5) == 0.0, "the first one has been forgotten"


def test_attempts_for_the_same_loss_count_however_long_they_take():
    budget = RestartBudget(RecoveryConfig(max_rank_restarts=3, restart_window_s=100))
    assert budget.next_delay_s(0.0, 0.0) == 0.0
    assert [budget.next_delay_s(now_s, 150.0) for now_s in (150.0, 350.0, 550.0)] == [0.0] * 3
    assert budget.next_delay_s(750.0, 150.0) is None
    assert budget.next_delay_s(900.0, 900.0) == 0.0, "it has served since"
