"""Looks that are repeated."""

from __future__ import annotations

import threading

from raycore.metrics.periodic import Periodic


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
        assert again.wait(10)
    finally:
        periodic.stop()
    assert "looker failed" in caplog.text
    assert "no such file" in caplog.text
