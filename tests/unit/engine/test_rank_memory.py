"""Memory that goes and returns, and what has to happen with it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fake_executor import FakeExecutor

from raycore.activity import RUNNING, TAGS
from raycore.cache_layout import CacheLayout, CacheLimits, KVCacheConfig
from raycore.engine.part import EngineHooks, EnginePart
from raycore.engine.rank_memory import RankMemory

CACHE = KVCacheConfig(9, CacheLayout((), CacheLimits(16, 64, 64)))


class Adapters(EnginePart):
    """A part that notes what it is told."""

    def __init__(self, calls: list[tuple[object, ...]]) -> None:
        self.calls = calls

    def sleep(self, *, drops: bool) -> None:
        self.calls.append(("adapters sleep", drops))

    def wake(self, timeout_s: float) -> None:
        self.calls.append(("adapters wake", timeout_s))


class Everything:
    """Notes the order of all calls."""

    def __init__(self, *, has_adapters: bool = False) -> None:
        executor = FakeExecutor()
        self.calls = executor.memory_calls
        scheduler = SimpleNamespace(start_over=lambda: self.calls.append(("start_over",)))
        hooks = EngineHooks([Adapters(self.calls)] if has_adapters else [])
        self.memory = RankMemory(executor, scheduler, hooks, CACHE, 5.0)


@pytest.mark.parametrize("level", [1, 2])
def test_requests_start_over_when_the_cache_is_gone(level: int):
    rank = Everything()
    rank.memory.set_activity(RUNNING.put_to_sleep(level))
    assert rank.calls == [("sleep", level, TAGS), ("start_over",)]
    rank.memory.set_activity(RUNNING)
    assert rank.calls[2:] == [("wake_up", ("weights",)), ("initialize_cache", 9)]


def test_a_cache_that_is_woken_before_the_weights_is_allocated_after_them():
    rank = Everything()
    asleep = RUNNING.put_to_sleep(1)
    rank.memory.set_activity(asleep)
    rank.calls.clear()
    rank.memory.set_activity(asleep.woken(["kv_cache"]))
    assert rank.calls == []
    rank.memory.set_activity(RUNNING.paused())
    assert rank.calls == [("wake_up", ("weights",)), ("initialize_cache", 9)]
    rank.memory.set_activity(RUNNING)
    assert len(rank.calls) == 2


def test_workers_are_told_to_read_no_weights():
    rank = Everything()
    asleep = RUNNING.put_to_sleep(2)
    rank.memory.set_activity(asleep)
    rank.calls.clear()
    rank.memory.set_activity(asleep.woken(["weights"], reads_weights=False))
    assert rank.calls == [("wake_up", ("weights",), "reads no weights")]


@pytest.mark.parametrize("level", [1, 2])
def test_adapters_sleep_before_the_weights_and_wake_after_them(level: int):
    rank = Everything(has_adapters=True)
    rank.memory.set_activity(RUNNING.put_to_sleep(level))
    rank.memory.set_activity(RUNNING)
    assert [call for call in rank.calls if call[0] in ("adapters sleep", "sleep", "wake_up", "adapters wake")] == [
        ("adapters sleep", level == 2),
        ("sleep", level, TAGS),
        ("wake_up", ("weights",)),
        ("adapters wake", 5.0),
    ]


def test_a_pause_frees_no_memory():
    rank = Everything(has_adapters=True)
    rank.memory.set_activity(RUNNING.paused())
    rank.memory.set_activity(RUNNING)
    assert rank.calls == []
