"""The semaphores of processes that were killed while they joined, which the next join on the node removes."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from raycore.rpc.channel import ABANDONED_S, remove_abandoned_semaphores

pytestmark = pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="there is no /dev/shm")


@pytest.fixture
def left() -> Iterator[Callable[[str, float], Path]]:
    """Returns a file of this name in /dev/shm, whose process, with an id that none can have, has left it then."""
    paths: list[Path] = []

    def leave(kind: str, at_s: float) -> Path:
        paths.append(Path("/dev/shm", f"sem.{kind}{1 << 30}-{os.getpid()}{len(paths)}"))
        paths[-1].write_bytes(bytes(32))
        os.utime(paths[-1], times=(at_s, at_s))
        return paths[-1]

    yield leave
    for path in paths:
        with suppress(FileNotFoundError):
            path.unlink()


def test_old_semaphores_that_nobody_has_open_are_removed(left: Callable[[str, float], Path]):
    header, data, foreign = (left(kind, 0.0) for kind in ("hdr", "obj", "other"))
    remove_abandoned_semaphores()
    assert not header.exists()
    assert not data.exists()
    assert foreign.exists(), "only Ray's"


def test_semaphores_that_somebody_may_still_open_stay(left: Callable[[str, float], Path]):
    young = left("hdr", time.time() - ABANDONED_S / 2)
    held = left("obj", 0.0)
    with open(held, "r+b") as file, mmap.mmap(file.fileno(), 32):
        remove_abandoned_semaphores()
    assert young.exists()
    assert held.exists(), "a process has it open"


def test_nothing_is_removed_for_a_user_whose_it_is_not(
    left: Callable[[str, float], Path], monkeypatch: pytest.MonkeyPatch
):
    header = left("hdr", 0.0)
    monkeypatch.setattr(os, "getuid", lambda: -1)
    remove_abandoned_semaphores()
    assert header.exists()
