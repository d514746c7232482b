"""How tests wait for what comes about by itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

LONG_S = 90.0
"""Longer than anything takes, even if other processes keep the cores busy. Only what hangs takes as long."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05

T = TypeVar("T")


def eventually(look: Callable[[], T], what: str | Callable[[], object] = "", timeout_s: float = LONG_S) -> T:
    """Return the first value of `look()` that is true.

    Raises:
        AssertionError: there was none within `timeout_s` seconds. `what`: its message, or what returns it.
    """
    deadline_s, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
    while not (value := look()):
        if time.monotonic() > deadline_s:
            raise AssertionError(what() if callable(what) else what or f"it didn't come about within {timeout_s:g} s")
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
    return value
