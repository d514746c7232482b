"""For how long a rank has made no progress, with a clock that the test sets."""

from __future__ import annotations

from contextlib import suppress

import pytest

from raycore.engine import progress
from raycore.engine.progress import LoopProgress


class Clock:
    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_a_step_ages_whether_workers_answer_or_not(clock: Clock) -> None:
    own = LoopProgress(lambda: True)
    assert own.age_s() == 0
    with own.step():
        clock.now_s += 3
        assert own.age_s() == 3
    assert own.age_s() == 0


def test_long_work_ages_only_while_workers_do_not_answer(clock: Clock) -> None:
    answers: list[bool] = []
    own = LoopProgress(lambda: answers[-1])
    with own.long_work():
        for answer, age_s in [(False, 5), (True, 0), (True, 0), (False, 5), (False, 10)]:
            answers.append(answer)
            clock.now_s += 5
            assert own.age_s() == age_s
    assert own.age_s() == 0
    clock.now_s += 5
    with own.step():
        clock.now_s += 2
        assert own.age_s() == 2, "what workers have answered before doesn't count"


def test_failed_long_work_counts_as_ended(clock: Clock) -> None:
    own = LoopProgress(lambda: False)
    for work in (own.step, own.long_work):
        with suppress(OSError), work():
            clock.now_s += 1
            raise OSError
        assert own.age_s() == 0
