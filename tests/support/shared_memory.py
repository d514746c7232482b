"""Finds the files that ended processes have left in /dev/shm, while other programs use it, too."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from raycore.rpc.channel import remove_abandoned_semaphores

_DIRECTORY = "/dev/shm"


def files() -> set[str]:
    """The names of all files in /dev/shm."""
    return set(os.listdir(_DIRECTORY))


def abandoned_since(before: set[str], timeout_s: float = 5.0) -> list[str]:
    """The names of files that are not in `before`, and that no process of this user has mapped.

    Another program may just be creating or removing a file, so a file has to stay like this for `timeout_s` seconds.
    """
    deadline_s = time.monotonic() + timeout_s
    while left := files() - before:
        left -= _mapped_files()
        if not left or time.monotonic() > deadline_s:
            break
        time.sleep(0.1)
    return sorted(left)


def after_the_next_start(names: list[str]) -> list[str]:
    """The paths of those of these files that the next start of an engine on this node, after a while, leaves there.

    A process that is killed in the moment in which it joins leaves two small semaphores, which nobody else can remove
    at once.
    """
    paths = [f"{_DIRECTORY}/{name}" for name in names]
    for path in paths:
        with suppress(FileNotFoundError):
            os.utime(path, times=(0, 0))
    remove_abandoned_semaphores()
    return [path for path in paths if os.path.exists(path)]


@contextmanager
def nothing_stays() -> Iterator[None]:
    """Raise AssertionError if processes leave files in /dev/shm."""
    before = files()
    yield
    assert abandoned_since(before) == []


def _mapped_files() -> set[str]:
    found: set[str] = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            maps = (entry / "maps").read_text()
        except OSError:  # it has ended, or is another user's
            continue
        if f" {_DIRECTORY}/" in maps:
            found |= {line.partition(f" {_DIRECTORY}/")[2] for line in maps.splitlines()}
    return found
