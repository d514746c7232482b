"""What `peak_bytes` counts, and that it doesn't lose anything without a word."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import peak_memory
import pytest
import torch
from peak_memory import peak_bytes

MIB = 1 << 20


class Garbage:
    """A cycle that holds memory until a collection."""

    def __init__(self) -> None:
        self.itself = self
        self.memory = torch.empty(5 * MIB, dtype=torch.uint8)


def test_the_most_that_is_held_at_a_time_counts() -> None:
    def step() -> None:
        first = torch.empty(2 * MIB, dtype=torch.uint8)
        second = torch.empty(MIB, dtype=torch.uint8)
        del first
        torch.cat([second, second[:1000]])

    assert 3 * MIB <= peak_bytes(step) < 3.1 * MIB


def test_what_a_collection_frees_of_earlier_calls_hides_nothing() -> None:
    def step() -> None:
        gc.collect()
        torch.empty(3 * MIB, dtype=torch.uint8)

    gc.disable()
    try:
        assert peak_bytes(Garbage) >= 5 * MIB
        assert 3 * MIB <= peak_bytes(step) < 3.1 * MIB
    finally:
        gc.enable()


def test_a_lost_event_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def lossy(profiler: Any) -> Any:
        events = sorted(allocations(profiler), key=lambda event: -abs(event.alloc_size))
        return [event for event in allocations(profiler) if event.ptr != events[0].ptr]

    allocations = peak_memory._allocations
    monkeypatch.setattr(peak_memory, "_allocations", lossy)
    with pytest.raises(AssertionError, match="lost an event"):
        peak_bytes(lambda: [torch.empty(size * MIB, dtype=torch.uint8) for size in (1, 2, 1)])


def test_events_out_of_order_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [SimpleNamespace(ptr=each, alloc_size=8, total_allocated=8 * each) for each in (1, 3, 2)]
    monkeypatch.setattr(peak_memory, "_allocations", lambda _: events)
    with pytest.raises(AssertionError, match="lost an event"):
        peak_bytes(lambda: None)
