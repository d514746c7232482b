"""Work at a low priority."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from raycore.node.niceness import run_yielding


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere, threads have no niceness")
def test_only_the_thread_of_the_work_yields():
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = niceness()
    assert run_yielding(niceness) > before or before == 19
    assert niceness() == before


def test_an_error_of_the_work_reaches_the_caller():
    with pytest.raises(ZeroDivisionError):
        run_yielding(lambda: 1 // 0)
