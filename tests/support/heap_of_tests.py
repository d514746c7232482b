"""A pytest plugin: what lives until the end of a run is no business of the garbage collector.

Thousands of collected tests do, and so do the modules and caches that come with the tests that run. Each full
collection would visit them, and a worker that sleeps asks for one.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Generator
from typing import Any

import pytest

SLOW_S = 0.1
"""CPU seconds of a full collection after which the heap has grown enough."""


def pytest_configure(config: pytest.Config) -> None:
    heap = HeapOfTests(gc.freeze)
    gc.callbacks.append(heap.on_collection)
    config.pluginmanager.register(heap)


class HeapOfTests:
    """Freezes the heap after the tests are collected, and between two files once full collections take long."""

    def __init__(self, freeze: Callable[[], None], cpu_s: Callable[[], float] = time.thread_time) -> None:
        self._freeze = freeze
        self._cpu_s = cpu_s
        self._began_s = 0.0
        self._is_slow = False

    def on_collection(self, phase: str, info: dict[str, Any]) -> None:
        """For `gc.callbacks`."""
        if info["generation"] < 2:
            return
        if phase == "start":
            self._began_s = self._cpu_s()
        else:
            self._is_slow |= self._cpu_s() - self._began_s > SLOW_S

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        """Not even a worker that sleeps in this process thaws what is frozen. Tests of that have their own."""
        gc.disable()
        try:
            return (yield)
        finally:
            self._freeze()
            gc.enable()
            gc.freeze = gc.unfreeze = lambda: None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:
            if self._is_slow and nextitem is not None and nextitem.path != item.path:
                gc.collect()  # what nobody has any more would stay
                self._freeze()
                self._is_slow = False
