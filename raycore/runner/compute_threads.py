"""Chooses the number of compute threads on a CPU, for each step and within long ones.

A step's work is split among threads that wait for each other some hundred times. If other processes need a core, the
thread on it makes all others wait: one busy process can make steps with a thread on every core ten times as long, but
steps with one thread less hardly longer. So when threads have waited for a core, the next layers and steps use fewer of
them. When enough cores have been free for a while, they use more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

from raycore.layers.rows import TILE_ROWS
from raycore.node.cpu_time import OtherProcesses, ThreadWaits
from raycore.node.resources import usable_cores

_LARGE_STEP = 1 << 25
"""Steps with at least this many multiplications (about half a millisecond on one core) use several threads.

In smaller steps, it costs more time to start and join the threads than they save.
"""
_READ = 10
"""Reading a number from memory takes as long as so many multiplications."""
_LOOK_AFTER_S = 0.1
"""Time in large steps, after which the threads' waiting is looked at."""
_TOO_MUCH_WAITING = 0.3
"""Of the maximum number of threads. If more wait on average, there are too many of them.

With a half of the threads, twice as many may wait. So of two engines on a node, the one with more threads gives up one.
"""
_MORE_AFTER_S = 0.5
_MORE_AFTER_AT_MOST_S = 16.0
"""How long cores must have been free before there are more threads. Doubles each time this was a mistake."""
_FREE_CORES = 0.6
"""Cores that must be free for another thread."""
_PAUSE_S = 0.01
"""If no step ran for so long, it doesn't matter what other processes did meanwhile."""


class Weighed(Protocol):
    """Layers, as far as the time of a step depends on them."""

    num_weights: int
    """Number of multiplications for one token, without those of attention."""
    num_key_value_numbers: int
    """How many numbers of one token's keys and values a later token reads, in all layers."""


class ComputeThreads:
    """The compute threads of one worker's steps. Call `begin_step`, `adapt` after some layers, and `end_step`."""

    def __init__(self, max_threads: int = 1, *, is_fixed: bool = False) -> None:
        """`is_fixed`: use `max_threads` in every large step."""
        self.is_fixed = is_fixed
        self._max_threads = max_threads
        self._num_threads = max_threads
        self._noted_s: float | None = None
        """Until when the current step was noted. None if it is small, or there is none."""
        self._ended_s = 0.0
        is_adaptive = max_threads > 1 and not is_fixed
        self._controller = ThreadController(max_threads, usable_cores()) if is_adaptive else None

    @property
    def is_single(self) -> bool:
        """Whether every step has one thread, so that there is nothing to choose."""
        return self._max_threads == 1

    def begin_step(self, num_tokens: int, num_weights: int, num_cached: int = 0) -> None:
        """Set the number of threads for a step.

        Each weight is multiplied with something of each token. `num_cached`: how many numbers of the KV cache are read.
        """
        if self.is_single:
            return
        is_small = (num_tokens + _READ) * num_weights + _READ * num_cached < _LARGE_STEP
        torch.set_num_threads(1 if is_small else self._num_threads)
        self._noted_s = None if is_small else time.perf_counter()
        if self._controller is not None and self._noted_s is not None and self._noted_s - self._ended_s > _PAUSE_S:
            self._controller.resume()

    def begin_layers(self, layers: Weighed, num_tokens: int, num_keys: int = 0) -> None:
        """Set the number of threads for a step of some layers.

        `num_keys`: how many tokens' keys and values attention reads in each layer.
        """
        if self.is_fixed:
            num_tokens, num_keys = TILE_ROWS, 0  # every step uses the same number of threads
        self.begin_step(num_tokens, layers.num_weights, num_keys * layers.num_key_value_numbers)

    def adapt(self) -> None:
        """Set the number of threads for the rest of a step, from how it went so far. Does nothing between steps."""
        if self._controller is None or self._noted_s is None:
            return
        last_s, self._noted_s = self._noted_s, time.perf_counter()
        num_threads = self._controller.note(self._noted_s - last_s)
        if num_threads != self._num_threads:
            self._num_threads = num_threads
            torch.set_num_threads(num_threads)

    def end_step(self) -> None:
        """Note how the step went. Does nothing if no step has begun."""
        self.adapt()
        if self._noted_s is not None:
            self._ended_s, self._noted_s = self._noted_s, None


ONE_THREAD = ComputeThreads()


class ThreadController:
    """Decides how many threads are best, from how long they wait for cores and how many cores others use."""

    def __init__(
        self,
        max_threads: int,
        num_cores: int,
        *,
        waits: ThreadWaits | None = None,
        cores_used_by_others: Callable[[], float | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            num_cores: how many cores this process may use.
            waits: how long threads have waited for a core. None: those of this process.
            cores_used_by_others: how many cores other processes have used since the last call.
            clock: returns seconds.
        """
        self.num_threads = max_threads
        self._max_threads = max_threads
        self._num_cores = num_cores
        self._waits = waits or ThreadWaits()
        self._cores_used_by_others = cores_used_by_others or OtherProcesses().cores_used
        self._clock = clock
        self._in_steps_s = 0.0
        self._changed_s = clock()
        self._more_after_s = _MORE_AFTER_S
        self._was_raised = False

    def note(self, in_step_s: float) -> int:
        """Note that so many seconds of a large step have passed. Returns how many threads the next ones use."""
        self._in_steps_s += in_step_s
        if self._in_steps_s < _LOOK_AFTER_S:
            return self.num_threads
        waiting = self._waits.new_s() / self._in_steps_s
        self._in_steps_s = 0.0
        unchanged_s = self._clock() - self._changed_s
        # of two threads, both stand still while one waits: one alone is faster if that is half of the time
        if waiting > max(1.0, _TOO_MUCH_WAITING * self._max_threads) / self.num_threads:
            if self._was_raised and unchanged_s < self._more_after_s:
                self._more_after_s = min(2 * self._more_after_s, _MORE_AFTER_AT_MOST_S)
            self._change(-1)
            self._cores_used_by_others()  # count from now on
        elif self.num_threads < self._max_threads and unchanged_s >= self._more_after_s:
            used = self._cores_used_by_others()
            is_free = used is not None and self._num_cores - used >= self.num_threads + _FREE_CORES
            self._change(1 if is_free else 0)
        elif unchanged_s >= _MORE_AFTER_AT_MOST_S:
            self._more_after_s = _MORE_AFTER_S
        return self.num_threads

    def resume(self) -> None:
        """Ignore which cores other processes have used until now, because no step ran meanwhile."""
        if self.num_threads < self._max_threads:
            self._cores_used_by_others()

    def _change(self, by: int) -> None:
        self.num_threads = max(1, self.num_threads + by)
        self._was_raised = by > 0
        if self._was_raised:
            self._waits.read_all()
        self._changed_s = self._clock()
