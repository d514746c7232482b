"""Work at a low priority."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from raycore.node.niceness import run_yielding


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere, threads have no niceness")
def test_run_yielding_lowers_the_priority_only_of_its_own_thread():
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = niceness()
    assert run_yielding(niceness) > before or before == 19
    assert niceness() == before


def test_run_yielding_raises_the_error_of_its_work():
    with pytest.raises(ZeroDivisionError):
        run_yielding(lambda: 1 // 0)
