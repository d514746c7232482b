"""Stands in for `raycore.system`: the modules of the simulated world, by the names that the product asks for."""

from __future__ import annotations

import gc as real_gc
import os as real_os
import random as real_random
import select as real_select
import signal as real_signal
import socket as real_socket
import sys
import time as real_time
import types
import uuid as real_uuid
from collections.abc import Callable
from typing import Any

from simulation.world import descriptors, futures, kernel, loops, memory, queues, streams, threads
from simulation.world.kernel import ProcessExit
from simulation.world.threads import world

NAME = "raycore.system"


def _process() -> kernel.Process:
    thread = world().current
    assert thread is not None
    return thread.process


def find_process(pid: int) -> kernel.Process | None:
    """The process with this pid that runs on the machine of the one that asks."""
    here = world()
    machine = None if here.current is None else here.current.process.machine
    for process in here.processes:
        if process.pid == pid and process.machine is machine and not process.has_ended:
            return process
    return None


def _process_of(pid: int) -> kernel.Process:
    process = find_process(pid)
    if process is None:
        raise ProcessLookupError(3, "No such process", str(pid))
    return process


class Unsimulated(types.ModuleType):
    """A module of which the world has only what the product needs."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"the simulated world has no {self.__name__}.{name}")


def _module(name: str, /, **values: Any) -> types.ModuleType:
    made = Unsimulated(name)
    made.__dict__.update(values)
    return made


# ---- time

EPOCH_S = 1.7e9
"""The wall clock's time when a world begins."""


def _sleep(seconds: float) -> None:
    if seconds < 0:
        raise ValueError("sleep length must be non-negative")
    world().park("its sleep to end", seconds)


def _now_s() -> float:
    return 0.0 if kernel.the_world is None else kernel.the_world.now_s


time = _module(
    "time",
    monotonic=_now_s,
    perf_counter=_now_s,
    thread_time=_now_s,
    process_time=_now_s,
    time=lambda: EPOCH_S + _now_s(),
    monotonic_ns=lambda: int(_now_s() * 1e9),
    perf_counter_ns=lambda: int(_now_s() * 1e9),
    time_ns=lambda: int((EPOCH_S + _now_s()) * 1e9),
    sleep=_sleep,
    **{name: getattr(real_time, name) for name in ("gmtime", "localtime", "strftime", "strptime", "struct_time")},
)

# ---- chance


def _chance() -> real_random.Random:
    """The random numbers that the product draws. Before a world begins they are those of a fixed one."""
    here = kernel.the_world
    if here is None:
        return _before
    if not hasattr(here, "_chance"):
        here._chance = here.generator("the product's random numbers")  # pyright: ignore[reportAttributeAccessIssue]
    return here._chance  # pyright: ignore[reportAttributeAccessIssue]


_before = real_random.Random(0)


class Random(real_random.Random):
    """A generator. Without a seed, it has one of this world."""

    def __init__(self, x: Any = None) -> None:
        super().__init__(_chance().getrandbits(64) if x is None else x)


def _of_chance(name: str) -> Callable[..., Any]:
    return lambda *args, **kwargs: getattr(_chance(), name)(*args, **kwargs)


_DRAWS = "random uniform randint randrange choice choices sample shuffle expovariate gauss getrandbits randbytes"
random = _module("random", Random=Random, **{name: _of_chance(name) for name in _DRAWS.split()})


def _token_bytes(nbytes: int | None = None) -> bytes:
    return _chance().randbytes(32 if nbytes is None else nbytes)


secrets = _module(
    "secrets",
    token_bytes=_token_bytes,
    token_hex=lambda nbytes=None: _token_bytes(nbytes).hex(),
    token_urlsafe=lambda nbytes=None: _token_bytes(nbytes).hex(),
    choice=_of_chance("choice"),
    randbelow=_of_chance("randrange"),
    compare_digest=lambda a, b: a == b,
)
uuid = _module("uuid", UUID=real_uuid.UUID, uuid4=lambda: real_uuid.UUID(bytes=_token_bytes(16), version=4))

# ---- processes


def _kill(pid: int, number: int) -> None:
    process = _process_of(pid)
    if number == 0:
        return
    if number == real_signal.SIGKILL:
        world().kill(process)
    elif number == real_signal.SIGSTOP:
        world().stop(process)
    elif number == real_signal.SIGCONT:
        world().go_on(process)
    elif callable(process.handlers.get(number)):
        world().interrupt(process, number)
    elif process.handlers.get(number) != real_signal.SIG_IGN:
        world().kill(process, -number)
    threads.pause()


_hooks_of_forks: list[Callable[[], object]] = []
"""What children do first, which were forked: it was registered when modules were imported."""


def _at_fork(*, after_in_child: Callable[[], object] | None = None, **_: object) -> None:
    if after_in_child is not None:
        _hooks_of_forks.append(after_in_child)


def fork(name: str, main: Callable[[], object]) -> kernel.Process:
    """A child of the process that runs, with what the variables of modules have there. It has none of its threads, runs
    `main`, and ends. What both refer to isn't copied: a child that changes anything of it does harm to its parent."""
    here, parent = world(), _process()
    child = here.process(name, parent.environment, parent)
    child.machine, child.exit_hooks = parent.machine, list(parent.exit_hooks)
    here.systems["own state"].copy(child)

    def run() -> None:
        for hook in _hooks_of_forks:
            hook()
        main()
        here.kill(child, 0)

    here.start(child, "main", run)
    return child


def _exit(code: int) -> None:
    raise ProcessExit(code)


class _Environment:
    """`os.environ` of the process that asks."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of_process(), name)

    @staticmethod
    def _of_process() -> dict[str, str]:
        thread = threads._current()
        return dict(real_os.environ) if thread is None else thread.process.environment

    def __getitem__(self, key: str) -> str:
        return self._of_process()[key]

    def __setitem__(self, key: str, value: str) -> None:
        self._of_process()[key] = value

    def __delitem__(self, key: str) -> None:
        del self._of_process()[key]

    def __contains__(self, key: object) -> bool:
        return key in self._of_process()

    def __iter__(self) -> Any:
        return iter(self._of_process())

    def __len__(self) -> int:
        return len(self._of_process())

    def __or__(self, other: Any) -> dict[str, str]:
        return self._of_process() | dict(other)


environ = _Environment()
_OF_PROCESSES: dict[str, Any] = {
    "getpid": lambda: real_os.getpid() if threads._current() is None else _process().pid,
    "getppid": lambda: parent.pid if (parent := _process().parent) else 1,
    "kill": _kill,
    "_exit": _exit,
    "urandom": _token_bytes,
    "environ": environ,
    "getenv": lambda key, default=None: environ.get(key, default),
    "cpu_count": lambda: 4,
    "nice": lambda increment: increment,
    "register_at_fork": _at_fork,
    "pipe2": descriptors.pipe2,
    "pidfd_open": lambda pid, flags=0: descriptors.pidfd_open(_process_of(pid)),
    "read": descriptors.read,
    "write": descriptors.write,
    "close": descriptors.close,
    "memfd_create": memory.create,
}
_REFUSED = ["fork", "forkpty", "wait", "waitpid", "killpg", "abort", "system", "popen", "execv", "posix_spawn"]
os = _module("os", **{name: value for name, value in vars(real_os).items() if name not in _REFUSED} | _OF_PROCESSES)


def _set_handler(number: int, handler: Any) -> Any:
    thread = world().current
    assert thread is not None
    if thread is not thread.process.main_thread:
        raise ValueError("signal only works in main thread of the main interpreter")
    before = _handler(number)
    thread.process.handlers[number] = handler
    return before


def _handler(number: int) -> Any:
    return _process().handlers.get(number, real_signal.SIG_DFL)


_SIGNALS = {name: value for name, value in vars(real_signal).items() if name.startswith(("SIG", "ITIMER", "Sig"))}
_HANDLERS = {
    "signal": _set_handler,
    "getsignal": _handler,
    "getitimer": lambda which: (0.0, 0.0),
    "default_int_handler": real_signal.default_int_handler,
}
signal = _module("signal", **_SIGNALS | _HANDLERS)
_hooks_of_modules: list[Callable[[], object]] = []
"""Exit hooks that were registered when modules were imported: each process has them."""


def _at_exit(hook: Callable[..., object], *args: Any, **kwargs: Any) -> Callable[..., object]:
    hooks = _hooks_of_modules if threads._current() is None else _process().exit_hooks
    hooks.append(lambda: hook(*args, **kwargs))
    return hook


def run_exit_hooks() -> None:
    """What Python does at the end of a process: call the exit hooks, the last one first."""
    for hook in reversed([*_hooks_of_modules, *_process().exit_hooks]):
        hook()


atexit = _module("atexit", register=_at_exit, unregister=lambda hook: None)
gc = _module(
    "gc",
    # the seed decides when garbage is collected
    **{name: lambda *_: None for name in ("enable", "disable", "freeze", "unfreeze", "set_threshold")},
    collect=real_gc.collect,
    isenabled=lambda: True,
    get_threshold=real_gc.get_threshold,
)

_EVENTS = {name: value for name, value in vars(real_select).items() if name.startswith("POLL")}
select = _module("select", poll=descriptors.Poll, **_EVENTS)
_NUMBERS = ("AF_", "SOCK_", "SOL_", "IPPROTO_", "TCP_", "SHUT_")
_FAMILIES = {name: value for name, value in vars(real_socket).items() if name.startswith(_NUMBERS)}
socket = _module(
    "socket",
    socket=streams.Socket,
    create_connection=streams.create_connection,
    create_server=streams.create_server,
    send_fds=streams.send_fds,
    recv_fds=streams.recv_fds,
    **_FAMILIES,
)


class _Unstarted:
    """A class from which others derive that aren't used."""

    def __class_getitem__(cls, item: Any) -> Any:
        return cls


def module() -> types.ModuleType:
    """The module that stands in for `raycore.system`."""
    asyncio = loops.module()
    values: dict[str, Any] = {
        "asyncio": asyncio,
        "atexit": atexit,
        "futures": futures,
        "gc": gc,
        "os": os,
        "queue": queues,
        "random": random,
        "secrets": secrets,
        "signal": signal,
        "threading": threads,
        "time": time,
        "uuid": uuid,
        "Executor": futures.Executor,
        "Future": futures.Future,
        "InvalidStateError": futures.InvalidStateError,
        "ThreadPoolExecutor": futures.ThreadPoolExecutor,
        "Empty": queues.Empty,
        "Full": queues.Full,
        "Queue": queues.Queue,
        "SimpleQueue": queues.SimpleQueue,
        "Lock": threads.Lock,
        "Thread": threads.Thread,
        "Timer": threads.Timer,
        "select": select,
        "socket": socket,
        # what no part of the control plane that is simulated uses
        "subprocess": _module("subprocess", Popen=_Unstarted),
        "SharedMemory": object,
    }
    made = types.ModuleType(NAME)
    made.__dict__.update(values)
    return made


def install() -> None:
    """Put this world in the product's place for the system. To be called before anything of raycore is imported.

    Does nothing if it is there.
    """
    if getattr(sys.modules.get(NAME), "threading", None) is threads:
        return
    assert not any(name == "raycore" or name.startswith("raycore.") for name in sys.modules), "raycore was imported"
    sys.modules[NAME] = module()
