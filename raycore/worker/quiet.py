"""Keeps the main thread of an idle worker from waking up a hundred times a second.

Ray has the main thread of each process look for signals every 10 ms. That is next to nothing for a busy worker,
but it is all that an idle one does: 0.6 % of a core each, measured, where the rest of the process takes 0.2 %. So a
worker that has waited for a while has its main thread sleep in a signal handler, for a little less than a second at a
time. Requests don't pass through that thread; a call of the actor's methods may take a second longer meanwhile.
"""

from __future__ import annotations

import signal
import threading
import time

REST_S = 0.9

_is_installed = False


def install() -> None:
    """Prepare this process. Call it on the main thread; elsewhere, where there can be no handler, it does nothing."""
    global _is_installed
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR2, _sleep)
        _is_installed = True


def _sleep(signal_number: int, frame: object) -> None:
    time.sleep(REST_S)


def rest() -> None:
    """Have the main thread of a prepared process sleep for `REST_S`."""
    main = threading.main_thread().ident
    if _is_installed and main is not None and threading.current_thread() is not threading.main_thread():
        signal.pthread_kill(main, signal.SIGUSR2)
