"""Threads change between any two statements of the modules for which that is asked."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from simulation.world import statements, threads
from simulation.world.kernel import Pace, World

SOURCE = '''"""A module."""
from __future__ import annotations

class Counter:
    """Counts."""
    count = 0

    def add(self, times: int) -> int:
        """Add."""
        for _ in range(times):
            before = self.count
            self.count = before + 1
        return self.count

    def add_at_once(self, times: int) -> int:
        for _ in range(times):
            self.count += 1
        return self.count

    def take(self) -> int:
        """Take."""
        count, self.count = self.count, 0
        return count


def outer():
    value = 0

    def inner():
        """Inner."""
        nonlocal value
        value += 1
        try:
            return value
        finally:
            value += 1

    inner()
    return value


async def slow(x):
    if x:
        return x
    else:
        return -1
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    Path(tmp_path, "stated").mkdir()
    Path(tmp_path, "stated", "__init__.py").write_text("")
    Path(tmp_path, "stated", "counter.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    statements.everywhere(["stated"])
    yield importlib.import_module("stated.counter")
    for name in ("stated", "stated.counter"):
        sys.modules.pop(name)


@pytest.mark.parametrize("change", ["add", "add_at_once"])
def test_an_unlocked_change_is_lost_by_some_seeds(module: ModuleType, change: str):
    def main() -> int:
        counter = module.Counter()
        workers = [threads.Thread(target=getattr(counter, change), args=[4]) for _ in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return counter.count

    found = {World(seed, Pace(3.0, 1e-6, False, 0.0)).run(main) for seed in range(30)}
    assert max(found) > min(found)
    assert min(found) < 8


def test_the_modules_mean_what_they_meant(module: ModuleType):
    assert module.outer() == 2
    assert module.Counter.add.__doc__ == "Add."
    assert module.Counter().add(3) == 3
    counter = module.Counter()
    assert (counter.add_at_once(3), counter.take(), counter.count) == (3, 3, 0)
    with pytest.raises(StopIteration) as end:
        module.slow(0).send(None)
    assert end.value.value == -1
