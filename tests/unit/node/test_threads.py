"""Coroutines that run on threads of their own."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future

import pytest
from waiting import LONG_S

from raycore.node import threads
from raycore.node.threads import run_apart


def test_a_coroutine_runs_beside_an_event_loop():
    async def answer():
        return threading.current_thread()

    async def outer():
        return run_apart(answer())

    assert asyncio.run(outer()) is not threading.current_thread()


def test_an_error_of_the_coroutine_is_raised():
    async def fail():
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        run_apart(fail())


def test_a_coroutine_is_cancelled_if_the_wait_is_interrupted(monkeypatch):
    class Interrupted(Future):
        def result(self, timeout=None):
            if timeout is None:
                assert runs.wait(LONG_S)
                raise KeyboardInterrupt
            return super().result(timeout)

    async def endless():
        try:
            runs.set()
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    runs, ended = threading.Event(), []
    monkeypatch.setattr(threads, "Future", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_apart(endless())
    assert ended == [True]
