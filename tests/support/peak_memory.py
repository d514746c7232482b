"""How much memory a call allocates at its worst, by torch and by numpy, counted rather than sampled."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

from torch._C._profiler import RecordScope

# torch.profiler's own class imports torch's compiler, which takes seconds
from torch.autograd import profiler as torch_profiler

# without the calls of operations, which nobody reads here, half as many events are recorded
_enable_for_memory = partial(torch_profiler._enable_profiler, scopes={RecordScope.USER_SCOPE})


def peak_bytes(function: Callable[[], Any]) -> int:
    """The most bytes that `function` holds at a time beyond what was there before.

    The sum of two peaks, of torch's CPU allocator and of Python's, so it is a little high where they don't coincide.
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
    results: Any = profiler.kineto_results
    deltas = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
    current = most = 0
    for _, delta in sorted(deltas, key=lambda each: each[0]):
        current += delta
        most = max(most, current)
    return most + peak - before
