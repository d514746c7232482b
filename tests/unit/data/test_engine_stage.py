"""Threads share an engine, which ends if a failure ended the pipeline."""

from __future__ import annotations

import threading

import pytest
from waiting import LONG_S

from raycore.data.engine_stage import Lent, RowLimit


class Made:
    def __init__(self) -> None:
        self.num_made = 0
        self.ended = threading.Semaphore(0)

    def make(self) -> int:
        self.num_made += 1
        return self.num_made


def fail(lent: Lent[int]) -> None:
    with pytest.raises(ValueError, match="bad"), lent.use():
        raise ValueError("bad")


def test_it_ends_after_a_failure_that_nothing_follows_and_is_made_again():
    made = Made()
    lent = Lent(made.make, lambda _: made.ended.release(), patience_s=0.01)
    with lent.use() as first, lent.use() as second:
        assert first == second == 1
    fail(lent)
    assert made.ended.acquire(timeout=LONG_S)
    with lent.use() as again:
        assert again == 2


def test_it_does_not_end_while_somebody_uses_it():
    made = Made()
    lent = Lent(made.make, lambda _: made.ended.release(), patience_s=0.01)
    with lent.use():
        fail(lent)
        assert not made.ended.acquire(timeout=0.1)
    assert made.ended.acquire(timeout=LONG_S)
    lent.close()
    assert made.num_made == 1


def test_no_more_rows_than_there_is_room_for_run_at_a_time():
    room = RowLimit(3)
    entered = threading.Event()

    def enter() -> None:
        with room.taken(2):
            entered.set()

    thread = threading.Thread(target=enter)
    with room.taken(2):
        thread.start()
        assert not entered.wait(0.1)
    assert entered.wait(LONG_S)
    thread.join()
    with RowLimit(None).taken(1_000):
        pass
