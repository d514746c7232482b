"""Keeps the main thread of an idle process from waking up a hundred times a second.

Ray has the main thread of each process look for signals every 10 ms. That is next to nothing for a busy process, but it
is most of what an idle one does: 0.6 to 0.9 % of a core each, measured, where the rest of the process takes 0.3 %. So a
process that has been idle for a while has its main thread sleep in a signal handler.

Ray dispatches the calls of an actor's methods on that thread. Work doesn't reach a worker that way; an engine it does,
so whoever is about to call an engine rings first, which ends the rest.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from contextlib import suppress

AWAKE_S = 1.0
"""For this long after a ring there is no rest: what it announced has yet to come."""

_bell: socket.socket | None = None
_rests_until_s = 0.0
_awake_until_s = 0.0


def install() -> str:
    """Prepare this process. Returns the name by which processes of this machine ring; empty where there is none.

    Call it on the main thread; elsewhere, where there can be no handler, it does nothing.
    """
    global _bell
    if threading.current_thread() is not threading.main_thread():
        return ""
    name = f"raycore-rest-{os.urandom(8).hex()}"
    _bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    _bell.bind(f"\0{name}")  # in the abstract namespace, so that no file is left behind
    signal.signal(signal.SIGUSR2, _sleep)
    return name


def rest(longest_s: float) -> None:
    """Have a prepared process's main thread sleep until a ring, for `longest_s` at most, unless it does already."""
    global _rests_until_s
    main = threading.main_thread().ident
    now_s = time.monotonic()
    if _bell is None or main is None or now_s < max(_rests_until_s, _awake_until_s):
        return
    _rests_until_s = now_s + longest_s
    signal.pthread_kill(main, signal.SIGUSR2)


class Ringer:
    """Ends the rest of other processes on this machine. Thread-safe."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)

    def ring(self, name: str) -> None:
        """Ring for the process that `install()` gave this name. One that is gone, or rung for already, is no error."""
        with suppress(OSError):
            self._socket.sendto(b"", f"\0{name}")


def _sleep(signal_number: int, frame: object) -> None:
    global _rests_until_s, _awake_until_s
    assert _bell is not None
    left_s = _rests_until_s - time.monotonic()
    if left_s > 0 and select.select([_bell], [], [], left_s)[0]:
        with suppress(BlockingIOError):
            while True:  # rings that came while nobody slept, too
                _bell.recv(1)
        _awake_until_s = time.monotonic() + AWAKE_S
    _rests_until_s = 0.0
