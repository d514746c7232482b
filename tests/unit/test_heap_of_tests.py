"""What the plugin freezes that keeps the garbage collector from visiting what lives until the end of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from heap_of_tests import SLOW_S, HeapOfTests

FIRST, SECOND = (SimpleNamespace(path=Path(name)) for name in ("test_first.py", "test_second.py"))


class Run:
    """A run whose collections take as long as is said."""

    def __init__(self) -> None:
        self.num_freezes = 0
        self._now_s = 0.0
        self._heap = HeapOfTests(self._freeze, lambda: self._now_s)

    def collect(self, generation: int, took_s: float) -> None:
        self._heap.on_collection("start", {"generation": generation})
        self._now_s += took_s
        self._heap.on_collection("stop", {"generation": generation})

    def end_test(self, item: Any, next_item: Any) -> None:
        hook: Callable[..., Any] = self._heap.pytest_runtest_protocol
        steps = hook(item, next_item)
        next(steps)
        with pytest.raises(StopIteration):
            next(steps)

    def _freeze(self) -> None:
        self.num_freezes += 1


def test_the_heap_is_frozen_after_the_file_in_which_a_full_collection_took_long() -> None:
    run = Run()
    run.collect(2, SLOW_S * 2)
    run.end_test(FIRST, FIRST)
    assert run.num_freezes == 0, "what the file's fixtures hold may go yet"
    run.end_test(FIRST, SECOND)
    assert run.num_freezes == 1
    run.end_test(SECOND, FIRST)
    assert run.num_freezes == 1, "nothing was slow since"
    run.collect(2, SLOW_S * 2)
    run.end_test(FIRST, None)
    assert run.num_freezes == 1, "the process ends"


def test_quick_and_partial_collections_freeze_nothing() -> None:
    run = Run()
    run.collect(2, SLOW_S / 2)
    run.collect(1, SLOW_S * 2)
    run.end_test(FIRST, SECOND)
    assert run.num_freezes == 0
