"""File descriptors that have to do with other processes: pipes, pidfds, and waiting for several of them."""

from __future__ import annotations

import errno
import itertools
import os
import select
from collections.abc import Sequence
from typing import Any

from simulation.world import kernel, memory
from simulation.world.kernel import pause
from simulation.world.threads import world

_FIRST = 1_000_000
"""No real descriptor has this number or a higher one."""

LATEST_S = 0.06
"""How long a pidfd may take to show the end of a process."""


class Descriptor:
    """Something that becomes readable."""

    def __init__(self) -> None:
        self.is_readable = False
        self.process: kernel.Process | None = None
        """Whose it is."""
        self.watchers: list[kernel.Thread] = []

    def show(self) -> None:
        """Be readable from now on."""
        self.is_readable = True
        for thread in self.watchers:
            world().unpark(thread)


class _Pipe(Descriptor):
    def __init__(self) -> None:
        super().__init__()
        self.content = b""


def _table() -> dict[int, Descriptor]:
    return world().systems.setdefault("descriptors", {})


def add(descriptor: Descriptor) -> int:
    """A number for a descriptor, which belongs to the process that runs."""
    here = world()
    assert here.current is not None
    descriptor.process = here.current.process
    numbers = here.systems.setdefault("numbers of descriptors", itertools.count(_FIRST))
    number = next(numbers)
    _table()[number] = descriptor
    return number


def open_in(process: kernel.Process) -> list[int]:
    """The numbers of the descriptors that a process has open."""
    return [number for number, each in _table().items() if each.process is process]


def all_open() -> list[Descriptor]:
    """Those of all processes."""
    return list(_table().values())


def _of(number: int) -> Descriptor:
    found = _table().get(number)
    if found is None:
        raise OSError(errno.EBADF, "Bad file descriptor")
    return found


def pipe2(flags: int) -> tuple[int, int]:
    pipe = _Pipe()
    return add(pipe), add(pipe)


def write(number: int, data: bytes) -> int:
    if number < _FIRST:
        return os.write(number, data)
    pipe = _of(number)
    assert isinstance(pipe, _Pipe)
    pipe.content += data
    pipe.show()
    pause()
    return len(data)


def read(number: int, size: int) -> bytes:
    if number < _FIRST:
        return os.read(number, size)
    pipe = _of(number)
    assert isinstance(pipe, _Pipe)
    pause()
    if not pipe.content:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    found, pipe.content = pipe.content[:size], pipe.content[size:]
    pipe.is_readable = bool(pipe.content)
    return found


def close(number: int) -> None:
    if number < _FIRST:
        memory.close(number)
        return
    _of(number)
    forget(number)
    pause()


def forget(number: int) -> None:
    """Close one of this world's descriptors, and let nobody else run."""
    del _table()[number]


def pidfd_open(process: kernel.Process) -> int:
    """A descriptor that is readable when the process has ended, some time later."""
    descriptor, here = Descriptor(), world()
    draws = here.systems.setdefault("ends of processes", here.generator("ends of processes"))
    process.on_end.append(lambda _: here.call_later(draws.uniform(0.005, LATEST_S), descriptor.show))
    return add(descriptor)


class Poll:
    """`select.poll`, for reading."""

    def __init__(self) -> None:
        self._numbers: dict[int, None] = {}

    def register(self, what: Any, eventmask: int = select.POLLIN) -> None:
        self._numbers[what if isinstance(what, int) else what.fileno()] = None

    def unregister(self, what: Any) -> None:
        del self._numbers[what if isinstance(what, int) else what.fileno()]

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        """`timeout`: milliseconds."""
        pause()
        here, table = world(), _table()
        thread = here.current
        assert thread is not None
        until_s = kernel.NEVER if timeout is None or timeout < 0 else here.now_s + timeout / 1000
        while not (ready := self._ready(table)) and here.now_s < until_s:
            watched = [table[number] for number in self._numbers]
            for each in watched:
                each.watchers.append(thread)
            here.park("a descriptor", None if until_s == kernel.NEVER else until_s - here.now_s)
            for each in watched:
                each.watchers.remove(thread)
        return ready

    def _ready(self, table: dict[int, Descriptor]) -> list[tuple[int, int]]:
        found: Sequence[tuple[int, Descriptor | None]] = [(number, table.get(number)) for number in self._numbers]
        return [
            (number, select.POLLNVAL if each is None else select.POLLIN)
            for number, each in found
            if each is None or each.is_readable
        ]
