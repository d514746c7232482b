"""The system on which the control plane runs: time, threads, processes, sockets, chance.

The packages that decide what an engine does take the modules that act on the system from here, and not from the
standard library: `tests/unit/test_system.py` lists them. In production they are the standard library's own, with
nothing in between. In a simulation, this package is another one from the start, in which a seed decides which thread
goes on, what time it is, and what a random number is.

Modules are imported when they are first asked for, because some take long, and most programs need few.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio as asyncio
    import atexit as atexit
    import gc as gc
    import os as os
    import queue as queue
    import random as random
    import secrets as secrets
    import select as select
    import signal as signal
    import socket as socket
    import subprocess as subprocess
    import threading as threading
    import time as time
    import uuid as uuid
    from concurrent import futures as futures
    from concurrent.futures import Executor as Executor
    from concurrent.futures import Future as Future
    from concurrent.futures import InvalidStateError as InvalidStateError
    from concurrent.futures import ThreadPoolExecutor as ThreadPoolExecutor
    from multiprocessing.shared_memory import SharedMemory as SharedMemory
    from queue import Empty as Empty
    from queue import Full as Full
    from queue import Queue as Queue
    from queue import SimpleQueue as SimpleQueue
    from threading import Lock as Lock
    from threading import Thread as Thread
    from threading import Timer as Timer

_MODULES = "asyncio atexit gc os queue random secrets select signal socket subprocess threading time uuid"
_CLASSES = {
    "concurrent.futures": ["Executor", "Future", "InvalidStateError", "ThreadPoolExecutor"],
    "multiprocessing.shared_memory": ["SharedMemory"],
    "queue": ["Empty", "Full", "Queue", "SimpleQueue"],
    "threading": ["Lock", "Thread", "Timer"],
}
"""Classes that are often named alone, by module."""

PLACES: dict[str, tuple[str, str | None]] = {
    **{name: (name, None) for name in _MODULES.split()},
    "futures": ("concurrent.futures", None),
    **{name: (module, name) for module, names in _CLASSES.items() for name in names},
}
"""All names that this package has: the module, and the name in it if it isn't the module itself."""


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = PLACES[name]
    value: Any = importlib.import_module(module)
    if attribute is not None:
        value = getattr(value, attribute)
    globals()[name] = value  # the next look finds it without this function
    return value
