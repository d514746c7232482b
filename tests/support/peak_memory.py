"""How much memory a call allocates at its worst, by torch and by numpy, counted rather than sampled."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

from torch._C._profiler import RecordScope, _EventType

# torch.profiler's own class imports torch's compiler, which takes seconds
from torch.autograd import profiler as torch_profiler

# without the calls of operations, which nobody reads here, half as many events are recorded
_enable_for_memory = partial(torch_profiler._enable_profiler, scopes={RecordScope.USER_SCOPE})


def peak_bytes(function: Callable[[], Any]) -> int:
    """The most bytes that `function` holds at a time beyond what was there before.

    The sum of two peaks, of torch's CPU allocator and of Python's, so it is a little high where they don't coincide.
    What was there before and is freed meanwhile doesn't count, because that may be the garbage of others.
    """
    profiler = torch_profiler.profile(profile_memory=True)
    tracemalloc.start()
    try:
        with mock.patch.object(torch_profiler, "_enable_profiler", _enable_for_memory), profiler:
            before, _ = tracemalloc.get_traced_memory()
            function()
            _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return _peak_of_torch(profiler) + peak - before


def _peak_of_torch(profiler: torch_profiler.profile) -> int:
    held: dict[int, int] = {}
    current = most = 0
    allocated = None
    for event in _allocations(profiler):
        # the allocator's own sum tells whether an event is missing or out of order
        assert allocated in (None, event.total_allocated - event.alloc_size), "torch's profiler has lost an event"
        allocated = event.total_allocated
        if event.alloc_size > 0:
            held[event.ptr] = event.alloc_size
            current += event.alloc_size
            most = max(most, current)
        else:
            current -= held.pop(event.ptr, 0)
    assert current == sum(held.values())
    return most


def _allocations(profiler: torch_profiler.profile) -> Iterator[Any]:
    """Memory taken (`alloc_size` > 0) and freed (< 0), in order of time."""
    results: Any = profiler.kineto_results
    events = list(results.experimental_event_tree())
    for event in events:
        events += event.children
    for event in sorted(events, key=lambda event: event.start_time_ns):
        if event.tag == _EventType.Allocation:
            yield event.typed[1]
