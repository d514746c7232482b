"""Looks that are repeated."""

from __future__ import annotations

import threading

from waiting import LONG_S

from raycore.metrics.periodic import Periodic
from raycore.recurring import Recurring


def test_a_periodic_call_that_fails_is_logged_and_repeated(caplog):
    looks = []
    again = threading.Event()

    def look():
        looks.append(len(looks))
        if len(looks) == 1:
            raise OSError("no such file")
        again.set()

    periodic = Periodic("looker", 0.01, look)
    periodic.start()
    try:
        assert again.wait(LONG_S)
    finally:
        periodic.stop()
    assert "looker failed" in caplog.text
    assert "no such file" in caplog.text


def test_a_periodic_call_that_goes_on_failing_is_logged_once_and_again_when_the_error_changes(caplog):
    looks = []
    enough = threading.Event()

    def look():
        looks.append(len(looks))
        if len(looks) == 20:
            enough.set()
        raise OSError("no such file" if len(looks) < 10 else "no space left")

    periodic = Periodic("looker", 0.001, look, failures=Recurring(least_s=0.0))
    periodic.start()
    try:
        assert enough.wait(LONG_S)
    finally:
        periodic.stop()
    assert [str(record.exc_info[1]) for record in caplog.records] == ["no such file", "no space left"]
