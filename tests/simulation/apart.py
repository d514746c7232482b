"""Runs work in a forked process of its own: a seed can't leave anything to the next one, nor stand still for ever.

The parent has imported everything before. Threads that a simulated world has ended stay as they are, with all that they
hold, until their process ends.
"""

from __future__ import annotations

import os
import pickle
import selectors
import signal
import sys
import traceback
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, Generic, TypeVar

from simulation.world import kernel

T = TypeVar("T")
K = TypeVar("K")

_HARD_LIMIT = 3.0
"""How many times its limit a process may take that doesn't even print its stacks."""


@dataclass(frozen=True)
class Died:
    """What stands for the result of work whose process has ended without one."""

    reason: str
    is_late: bool = False
    """Whether it was ended because it took too much real time."""


@dataclass
class _Child(Generic[K]):
    key: K
    pid: int
    fd: int
    data: bytearray


def run_apart(work: Callable[[], T], limit_s: float) -> T | Died:
    """The result of `work`, done in a process of its own within `limit_s` real seconds."""
    ((_, result),) = run_all_apart([(None, work)], 1, limit_s)
    return result


def run_all_apart(
    works: Iterable[tuple[K, Callable[[], T]]], num_processes: int, limit_s: float
) -> Generator[tuple[K, T | Died], None, None]:
    """The keys and results of `works`, as they come, each done in a process of its own.

    Args:
        num_processes: how many run at a time.
        limit_s: real seconds that each may take.
    """
    pending = iter(works)
    children = selectors.DefaultSelector()
    try:
        while True:
            while len(children.get_map()) < num_processes and (each := next(pending, None)) is not None:
                child = _start(*each, limit_s)
                children.register(child.fd, selectors.EVENT_READ, child)
            if not children.get_map():
                return
            for ready, _ in children.select(_HARD_LIMIT * limit_s) or [(None, 0)]:
                if ready is None:
                    raise TimeoutError(f"no process said anything within {_HARD_LIMIT * limit_s:g} s")
                child = ready.data
                if data := os.read(child.fd, 1 << 20):
                    child.data += data
                    continue
                children.unregister(child.fd)
                yield child.key, _end(child)
    finally:
        for each in list(children.get_map().values()):
            os.kill(each.data.pid, signal.SIGKILL)
            _end(each.data)
        children.close()


def _start(key: K, work: Callable[[], Any], limit_s: float) -> _Child[K]:
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        os.close(writing)
        return _Child(key, pid, reading, bytearray())
    try:
        os.close(reading)
        signal.signal(signal.SIGALRM, lambda _, frame: _give_up(writing, limit_s, frame))
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        try:
            result: Any = work()
        except BaseException:
            result = Died(traceback.format_exc())
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(writing, result)
    finally:
        os._exit(0)  # without exit hooks: those are the parent's


def _give_up(writing: int, limit_s: float, frame: FrameType | None) -> None:
    """Say what all threads do, and end this process: something waits outside of the simulated world, or spins."""
    world = kernel.the_world
    current = "".join(traceback.format_stack(frame))
    lines = [f"not over after {limit_s:g} s of real time", f"{world and world.current} runs:\n{current}"]
    lines += [] if world is None else [f"{thread}:\n{stack}" for thread, stack in kernel.stacks(world)]
    _write(writing, Died("\n".join(lines), is_late=True))
    os._exit(1)


def _write(fd: int, result: Any) -> None:
    data = pickle.dumps(result)
    while data:
        data = data[os.write(fd, data) :]


def _end(child: _Child[Any]) -> Any:
    os.close(child.fd)
    _, status = os.waitpid(child.pid, 0)
    with suppress(pickle.UnpicklingError, EOFError):
        return pickle.loads(bytes(child.data))
    return Died(f"its process ended with status {os.waitstatus_to_exitcode(status)} and without a result")
