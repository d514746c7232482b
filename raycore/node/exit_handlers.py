"""How a forked child ends without the exit handlers of C libraries that its parent has loaded."""

from __future__ import annotations

import ctypes

_libc = ctypes.CDLL(None)  # loaded here: a fork is no time for it


def skip_exit_handlers() -> None:
    """Have this process end after Python's own end, without what C libraries have registered so far.

    As the children of multiprocessing end. The exit code stays. Does nothing where the C library isn't glibc.
    """
    if hasattr(_libc, "on_exit"):
        # handlers are called last one first, each with the exit code, so this is `_exit(code)`
        _libc.on_exit(_libc._exit, None)
