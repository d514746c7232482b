"""Runs simulated threads one at a time. The seed decides who goes on, when, and how long everything takes.

A simulated thread is a greenlet. It runs until it waits, or until it comes to a place at which another one may go on:
each operation on a lock, queue, event or future is such a place. Time is virtual. It passes a little with each change
of threads, and jumps to the next deadline when all threads wait.

All choices come from one generator of random numbers, and from nothing else: the same seed gives the same run in any
process. So nothing in here may depend on an address, on the hash of a string, or on the order of a set.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import heapq
import itertools
import math
import operator
import random
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from greenlet import greenlet

NEVER = float("inf")

_loop_of_thread: Callable[[], Any] = asyncio._get_running_loop
_set_loop_of_thread: Callable[[Any], None] = asyncio._set_running_loop


class Deadlock(Exception):
    """All threads wait, and none has a deadline."""


class OutOfTime(Exception):
    """The scenario hasn't ended within the virtual time, or the number of changes of threads, that it has."""


class ProcessExit(BaseException):
    """Ends the simulated process in which it is raised, as `os._exit` does."""


class Thread:
    """A simulated thread."""

    def __init__(self, process: Process, name: str, number: int, run: Callable[[], object]) -> None:
        self.process = process
        self.name = name
        self.number = number
        """Unique in this world, and the same in each run of a seed."""
        self.waits_for = "its turn"
        """What a story or a deadlock's report says of it."""
        self.is_parked = False
        self.is_woken = False
        self.is_waiting = False
        """Whether it is in `park`, even while it handles a signal there."""
        self.is_over = False
        self.defers_signals = False
        """Whether no handler runs in it now: it is in a call of C++."""
        self.priority = 0.0
        self.values: dict[int, dict[str, Any]] = {}
        """The values of each `local()` in this thread."""
        self.body = greenlet(run)
        self._loop: Any = None
        """The event loop that runs in this thread."""
        self._wait = 0
        """The number of its wait. A deadline of an earlier one has no effect."""

    def __repr__(self) -> str:
        return f"{self.process.name}/{self.name}"


@dataclass(eq=False)
class Process:
    """A simulated process."""

    name: str
    pid: int
    parent: Process | None = None
    environment: dict[str, str] = field(default_factory=dict)
    machine: object = None
    """Where it runs. Processes find only those of their machine by pids."""
    exit_hooks: list[Callable[[], object]] = field(default_factory=list)
    handlers: dict[int, Any] = field(default_factory=dict)
    """What Python's `signal.signal` has set, by the signal's number."""
    log_handlers: list[tuple[str, Any]] = field(default_factory=list)
    """Handlers of loggers of which each process has its own, with the loggers' names."""
    signals: list[int] = field(default_factory=list)
    """Signals whose handlers its main thread has yet to run."""
    threads: list[Thread] = field(default_factory=list)
    has_ended: bool = False
    exit_code: int | None = None
    is_stopped: bool = False
    held: list[Thread] = field(default_factory=list)
    """Threads of a stopped process that could go on."""
    on_end: list[Callable[[Process], object]] = field(default_factory=list)
    """What others do when it ends: they are not part of it."""

    @property
    def main_thread(self) -> Thread:
        return self.threads[0]

    def __repr__(self) -> str:
        return f"{self.name} ({self.pid})"


@dataclass(frozen=True)
class Pace:
    """How a seed chooses. Different faults need different ones."""

    mean_pauses: float
    """Places at which a thread goes on before it lets others run, on average."""
    cost_s: float
    """Virtual seconds that pass with a change of threads, on average."""
    by_priority: bool
    """Threads have random priorities that change now and then. Otherwise each that can run is as likely to go on."""
    collections: float
    """How often a change of threads of the first process comes with a collection of garbage."""

    @staticmethod
    def drawn(choices: random.Random) -> Pace:
        return Pace(
            mean_pauses=choices.choice([1.0, 3.0, 20.0, 200.0]),
            cost_s=choices.choice([1e-6, 1e-5, 1e-4]),
            by_priority=choices.random() < 0.4,
            collections=choices.choice([0.0, 0.0, 1e-4]),
        )


_PRIORITY_CHANGES = 0.02
"""The share of changes of threads at which the one that ran gets the lowest priority."""

_priority = operator.attrgetter("priority")

the_world: World | None = None
"""The world whose threads run. None: while modules are imported, and in tests without one."""

_graves: list[object] = []
"""Threads that were ended from outside. If their frames were freed, Python would run their `finally` blocks."""


class World:
    """A simulated world. One at a time runs in a real process."""

    def __init__(
        self,
        seed: int,
        pace: Pace | None = None,
        *,
        last_s: float = 1e5,
        max_changes: int = 5_000_000,
        num_free_changes: int | None = None,
    ) -> None:
        """
        Args:
            pace: how it chooses. None: the seed decides.
            last_s: virtual seconds within which the scenario has to end.
            max_changes: changes of threads within which it has to end.
            num_free_changes: how often a thread may be left though it doesn't wait. None: without limit.
        """
        self.seed = seed
        self.choices = random.Random(seed)
        """Decides the order of threads. What the world contains draws from generators of its own: see `generator`."""
        self.pace = pace or Pace.drawn(self.choices)
        self.now_s = 0.0
        self.num_changes = 0
        self.current: Thread | None = None
        """The thread that runs. None: the world itself, between two threads."""
        self.failures: list[tuple[Thread, BaseException]] = []
        """What was raised in threads, and not caught."""
        self.processes: list[Process] = []
        self.story: list[tuple[float, str, str]] = []
        """(virtual time, who, what): all that `tell` was told."""
        self.systems: dict[str, Any] = {}
        """What the world contains beside processes, by name."""
        self.on_change: Callable[[], object] | None = None
        """Called between two threads: what judges all moments. It must not change what threads do."""
        self.on_process_change: Callable[[Process | None, Process], object] | None = None
        """Called with two processes before a thread of the second goes on, if one of the first went on last."""
        self.on_wait: Callable[[Thread], object] | None = None
        """Called before a thread waits. It must not wait, nor run what other threads do."""
        self._last_process: Process | None = None
        self._digest = hashlib.sha256()
        self._ready: list[Thread] = []
        self._deadlines: list[tuple[float, int, Thread | None, Any]] = []
        self._numbers = itertools.count(1)
        self._pids = itertools.count(1000)
        self._hub = greenlet(self._loop)
        self._outside: greenlet | None = None
        self._pauses_left: float = 1
        self._intruder: Thread | None = None
        """The thread that waits in `come_between`."""
        self._places_left = 0
        """How many places others come to before it goes on."""
        self._first: list[Thread] = []
        """Threads that go on before all others, in this order."""
        self._last_s = last_s
        self._max_changes = max_changes
        self._free_changes_left = NEVER if num_free_changes is None else num_free_changes
        self._ended_by: BaseException | None = None

    # ---- for the scenario

    def run(self, main: Callable[[], Any], name: str = "driver", environment: Mapping[str, str] | None = None) -> Any:
        """Run `main` in the first thread of a new process until it returns. Returns what it returned.

        All other threads then stand still for ever. Raises what `main` raised; Deadlock; OutOfTime.
        """
        global the_world
        assert the_world is None, "another world runs"
        outcome: list[Any] = []

        def first() -> None:
            outcome.append(main())

        process = self.process(name, environment)
        was_enabled = gc.isenabled()
        gc.disable()
        the_world = self
        self._outside = greenlet.getcurrent()
        self._hub.parent = self._outside
        try:
            thread = self.start(process, "main", first)
            self._until = thread
            self._hub.switch()
        finally:
            the_world = None
            _set_loop_of_thread(None)
            _graves.append(self)
            if was_enabled:
                gc.enable()
        if self._ended_by is not None:
            raise self._ended_by
        for failed, error in self.failures:
            if failed is thread:
                raise error
        return outcome[0] if outcome else None

    def tell(self, what: str, who: object = None) -> None:
        """Add an event to the story. `who`: by default the current thread."""
        line = (self.now_s, repr(who or self.current or "world"), what)
        self.story.append(line)
        self._digest.update(repr(line).encode())

    def fail(self, error: BaseException) -> None:
        """Have the seed fail by an error that the current thread doesn't end by."""
        if self.current is not None:
            self.failures.append((self.current, error))

    @property
    def digest(self) -> str:
        """A hash of the story so far, of the time, and of the number of changes of threads."""
        digest = self._digest.copy()
        digest.update(f"{self.now_s!r} {self.num_changes}".encode())
        return digest.hexdigest()

    def generator(self, purpose: str) -> random.Random:
        """A generator of random numbers of its own, so that one more number drawn here changes nothing elsewhere."""
        return random.Random(f"{self.seed} {purpose}")

    # ---- processes

    def process(
        self, name: str, environment: Mapping[str, str] | None = None, parent: Process | None = None
    ) -> Process:
        """A new process. It has no thread yet."""
        process = Process(name, next(self._pids), parent, dict(environment or {}))
        self.processes.append(process)
        return process

    def kill(self, process: Process, exit_code: int = -9) -> None:
        """End a process at once. None of its threads runs anything more, not even a `finally`."""
        if process.has_ended:
            return
        process.has_ended, process.exit_code = True, exit_code
        for thread in process.threads:
            thread.is_parked = False
        _graves.append(process.threads)
        self._ready = [thread for thread in self._ready if thread.process is not process]
        process.held = []
        for told in process.on_end:
            told(process)
        if self.current is not None and self.current.process is process:
            self._leave()

    def stop(self, process: Process) -> None:
        """Let none of its threads go on (SIGSTOP), until `go_on`."""
        if process.has_ended or process.is_stopped:
            return
        process.is_stopped = True
        process.held += [thread for thread in self._ready if thread.process is process]
        self._ready = [thread for thread in self._ready if thread.process is not process]
        if self.current is not None and self.current.process is process:
            process.held.append(self.current)
            self._leave()

    def go_on(self, process: Process) -> None:
        """Let a stopped process go on (SIGCONT)."""
        process.is_stopped = False
        self._ready += process.held
        process.held = []

    def interrupt(self, process: Process, number: int) -> None:
        """Have the main thread of a process run its handler of a signal, as soon as it runs or waits."""
        if process.has_ended:
            return
        process.signals.append(number)
        main = process.main_thread
        if main.is_parked:
            self._make_ready(main)

    def handle_signals(self) -> None:
        """Have the current thread run the handlers that its process has yet to run, if it is the main one."""
        if self.current is not None and self.current.process.signals and not self.current.defers_signals:
            self._handle_signals(self.current)

    @contextmanager
    def signals_deferred(self) -> Generator[None, None, None]:
        """Have the current thread run no handlers before the end of the block, as in a call of C++ that waits."""
        thread = self.current
        assert thread is not None
        thread.defers_signals = True
        try:
            yield
        finally:
            thread.defers_signals = False
        self.handle_signals()

    # ---- threads

    def start(self, process: Process, name: str, run: Callable[[], object]) -> Thread:
        """Start a thread. It may run at once, or after any time."""
        thread = Thread(process, name, next(self._numbers), lambda: self._body(thread, run))
        thread.body.parent = self._hub
        thread.priority = self.choices.random()
        process.threads.append(thread)
        if not process.has_ended:
            self._add(thread)
        return thread

    def pause(self) -> None:
        """A place at which another thread may go on."""
        if self.current is None:
            return
        self._pauses_left -= 1
        if self._pauses_left <= 0 and self._free_changes_left > 0:
            self._pass_place()

    def let_others_run(self) -> None:
        """Let any thread go on, possibly the same."""
        thread = self.current
        assert thread is not None
        thread.waits_for = "its turn"
        self._add(thread)
        self._leave()
        self.handle_signals()
        # in a thread, because finalizers run there, and in that process which abandons engines and streams
        share = self.pace.collections if thread.process is self._until.process else 0.0
        if share and self.choices.random() < share:
            gc.collect()

    def come_between(self, places: int, timeout_s: float) -> None:
        """Have the current thread go on at one of the next places that others of its process come to, and alone then,
        until it waits. Until then, no thread is left that doesn't wait. At most one does so at a time.

        What two threads do one after the other, and a third one in between, is met so in one of as many seeds as there
        are places: otherwise, each place makes it less likely that nobody else goes on.

        Args:
            places: which of them, from 1.
            timeout_s: after so long, it goes on anyway.
        """
        if self._intruder is None:
            self._intruder, self._places_left = self.current, places
            self.park("a place at which to come between", timeout_s)
            self._intruder = None

    def park(self, what: str, timeout_s: float | None = None) -> bool:
        """Wait until somebody calls `unpark` with this thread. Returns False if `timeout_s` have passed before.

        `what`: the thing that is waited for, for reports.
        """
        thread = self.current
        assert thread is not None, f"the world itself waits for {what}"
        until_s = NEVER if timeout_s is None else self.now_s + max(timeout_s, 0.0)
        thread.is_woken = False
        thread.is_waiting = True
        if self.on_wait is not None:
            self.on_wait(thread)
        while True:
            thread.waits_for = what
            thread.is_parked = True
            thread._wait += 1
            if until_s < NEVER:
                heapq.heappush(self._deadlines, (until_s, next(self._numbers), thread, thread._wait))
            self._leave()
            self.handle_signals()
            if thread.is_woken or self.now_s >= until_s:
                thread.is_waiting = False
                return thread.is_woken

    def unpark(self, thread: Thread) -> None:
        """Let a thread go on that waits in `park`. Does nothing if it doesn't."""
        if thread.is_waiting:
            thread.is_woken = True
        if thread.is_parked:
            self._make_ready(thread)

    def call_later(self, delay_s: float, event: Callable[[], object]) -> None:
        """Call `event` between two threads, after a virtual time. It must not wait."""
        heapq.heappush(self._deadlines, (self.now_s + delay_s, next(self._numbers), None, event))

    def choose(self, options: list[Any]) -> Any:
        """One of several threads or things, of which each may be the one."""
        return options[0] if len(options) == 1 else options[self.choices.randrange(len(options))]

    def waiting(self) -> Iterator[tuple[Thread, str]]:
        """All threads that haven't ended, and what they wait for."""
        for process in self.processes:
            if not process.has_ended:
                for thread in process.threads:
                    if not thread.is_over:
                        yield thread, thread.waits_for

    # ---- inside

    def _body(self, thread: Thread, run: Callable[[], object]) -> None:
        try:
            run()
        except ProcessExit:
            self.kill(thread.process, 0)
        except BaseException as error:
            if not isinstance(error, SystemExit):
                self.failures.append((thread, error))
        thread.is_over = True
        thread.waits_for = "nothing"

    def _leave(self) -> None:
        """Leave the current thread. Returns when the world lets it go on."""
        self._hub.switch()

    def _add(self, thread: Thread) -> None:
        (thread.process.held if thread.process.is_stopped else self._ready).append(thread)

    def _pass_place(self) -> None:
        """Come to a place at which the current thread may be left."""
        intruder, here = self._intruder, self.current
        if intruder is not None:
            assert here is not None
            self._places_left -= here.process is intruder.process
            if self._places_left > 0:
                return
            self._intruder, self._first = None, [intruder, here]
            self.unpark(intruder)
        self._free_changes_left -= 1
        self.let_others_run()

    def _make_ready(self, thread: Thread) -> None:
        thread.is_parked = False
        thread._wait += 1
        self._add(thread)

    def _handle_signals(self, thread: Thread) -> None:
        process = thread.process
        while process.signals and thread is process.main_thread:
            number = process.signals.pop(0)
            handler = process.handlers.get(number)
            if callable(handler):
                was_waiting, was_woken = thread.is_waiting, thread.is_woken
                handler(number, None)  # whoever wakes the thread while this waits, may mean either wait
                thread.is_waiting, thread.is_woken = was_waiting, was_woken or thread.is_woken

    def _loop(self) -> None:
        """The hub: lets one thread after the other go on."""
        running: Any = None  # asyncio's running loop of the one real thread
        draw, rate = self.choices.random, 1.0 / self.pace.mean_pauses
        while not self._until.is_over and not self._until.process.has_ended:
            try:
                thread = self._next()
            except (Deadlock, OutOfTime) as error:
                self._ended_by = error
                return
            if thread is None:
                continue
            self.num_changes += 1
            self._pauses_left = 1 + int(-math.log(1.0 - draw()) / rate)  # as `expovariate` draws, in less time
            if self._first:
                self._pauses_left = NEVER
            elif self._intruder is not None:
                self._pauses_left = 0  # it counts the places
            if thread.process is not self._last_process:
                if self.on_process_change is not None:
                    self.on_process_change(self._last_process, thread.process)
                self._last_process = thread.process
            self.current = thread
            if thread._loop is not running:
                _set_loop_of_thread(thread._loop)
            thread.body.switch()
            thread._loop = running = _loop_of_thread()
            self.current = None
            self.now_s += draw() * 2 * self.pace.cost_s
            if self.on_change is not None:
                self.on_change()

    def _next(self) -> Thread | None:
        """Remove the thread that goes on next from those that can, and return it. None: look again."""
        deadlines = self._deadlines
        if not self._ready:
            if not deadlines:
                raise Deadlock("\n".join(f"{thread} waits for {what}" for thread, what in self.waiting()))
            self.now_s = max(self.now_s, deadlines[0][0])
        if self.now_s > self._last_s or self.num_changes > self._max_changes:
            lines = "\n".join(f"{thread} waits for {what}" for thread, what in self.waiting())
            raise OutOfTime(f"{self.now_s:.1f} s and {self.num_changes} changes of threads have passed:\n{lines}")
        while deadlines and deadlines[0][0] <= self.now_s:
            _, _, thread, what = heapq.heappop(deadlines)
            if thread is None:
                what()
            elif thread.is_parked and thread._wait == what:
                self._make_ready(thread)
        ready = self._ready
        if not ready:
            return None
        while self._first:
            first = self._first.pop(0)
            if first in ready:
                ready.remove(first)
                return first
        if self.pace.by_priority:
            index = ready.index(max(ready, key=_priority))
            if self.choices.random() < _PRIORITY_CHANGES:
                ready[index].priority = -self.choices.random()
        else:
            index = int(self.choices.random() * len(ready))
        ready[index], ready[-1] = ready[-1], ready[index]
        return ready.pop()


def pause() -> None:
    """A place at which another thread may go on. Does nothing outside of a world."""
    world = the_world
    if world is not None and world.current is not None:  # as in `World.pause`, which takes longer: this is called often
        world._pauses_left -= 1
        if world._pauses_left <= 0 and world._free_changes_left > 0:
            world._pass_place()


def stacks(world: World) -> Iterator[tuple[Thread, str]]:
    """The threads that haven't ended and don't run just now, with their stacks as text."""
    for process in world.processes:
        for thread in process.threads:
            frame = thread.body.gr_frame
            if frame is not None and not thread.is_over:
                yield thread, f"{thread} waits for {thread.waits_for}\n" + "".join(traceback.format_stack(frame))
