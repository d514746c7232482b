"""Connects this process to Ray: to an existing cluster, or to a local Ray that raycore starts.

When the last engine of the process ends, raycore shuts down a local Ray that it started. An existing cluster keeps
running.
"""

# ray's own types are partial:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from weakref import finalize

import ray
from ray._private import auto_init_hook
from ray.exceptions import AuthenticationError

from raycore.cluster.joining import Obstacle, find_obstacle, in_one_line, no_token
from raycore.cluster.local_ray.start import end_local_ray, start_local_ray
from raycore.errors import InitializationError, RaycoreError
from raycore.node.exit_handlers import skip_exit_handlers
from raycore.node.ports import parse_address
from raycore.node.signals import cancel_ray_alarm
from raycore.ray_api import is_connected, use_token_of_machine
from raycore.system import atexit, os, signal, threading, time

logger = logging.getLogger(__name__)

_CANCEL_TIMEOUT_S = 5.0
"""How long the interpreter's exit waits for engines whose start was cancelled. A local Ray takes 1 to 2 s to start."""

_REMEDY = "Check that the cluster runs, or set RAY_ADDRESS=local to run on this machine alone"

_lock = threading.RLock()
_num_users = 0
_is_ours = False

_shutdown_ray = ray.shutdown
_ends: list[finalize[..., Any]] = []
_starts: dict[threading.Event, Callable[[], object]] = {}
"""The cancel function of each engine start in progress, by the event that is set when the start ends."""
_is_exiting = False
_is_forked = False
"""Whether this process was forked from one with an engine, whose connection it can't use."""


def acquire_ray(num_cpus: float) -> bool:
    """Connect this process to Ray if it isn't connected, and count one more user of the connection.

    Joins the cluster that `RAY_ADDRESS` names, or else the cluster that the last `ray start` on this machine started.
    If there is neither, starts a local Ray with `num_cpus` logical CPUs and some spare ones. For each call,
    `release_ray()` must be called once.

    Returns: whether raycore started the Ray that this process is connected to.

    Raises:
        InitializationError: the cluster can't be joined, Ray Client is in use, the interpreter is exiting, or this
            process was forked from one with an engine.
    """
    global _num_users, _is_ours
    if _is_forked:  # asked before the lock, which a thread of the parent may have held
        raise InitializationError(
            "this process was forked from a program with an engine, and Ray doesn't work in it: use multiprocessing's "
            "'spawn' instead, or call an actor or a server that has an engine (docs/engines-in-actors.md)"
        )
    with _lock:
        if not is_connected():
            _num_users = 0
            _is_ours = _connect(num_cpus)
        if _is_exiting:
            raise InitializationError("the program is exiting: no engine can be started")
        _refuse_ray_client()
        _num_users += 1
        return _is_ours


def release_ray() -> None:
    """Count one user fewer. If no user is left, shut down Ray, provided that `acquire_ray()` started it."""
    global _num_users, _is_ours
    with _lock:
        _num_users = max(0, _num_users - 1)
        if _num_users == 0 and _is_ours:
            _is_ours = False
            end_local_ray()


def end_before_ray(end: finalize[..., Any]) -> None:
    """Have `end` called before Ray ends: at `ray.shutdown()`, or at the interpreter's exit.

    `end` must stop the threads that use Ray. A thread that calls Ray after Ray has ended starts another Ray, and that
    ends the program a minute later.
    """
    with _lock:
        _ends[:] = [other for other in _ends if other.alive]
        _ends.append(end)
        ray.shutdown = _shutdown_after_ends


def end_engines() -> None:
    """Call all that `end_before_ray()` was given."""
    for end in _ends.copy():
        end()


@contextmanager
def cancelled_at_exit(cancel: Callable[[], object]) -> Generator[None, None, None]:
    """If the interpreter exits while the block runs, call `cancel`, and delay the exit until the block ends, up to 5 s.

    At exit only daemon threads still run. A daemon thread that reaches the end of the block during the exit sleeps
    there until the process ends. Otherwise Python would print the exception that `cancel` caused in that thread.
    """
    has_ended = threading.Event()
    _starts[has_ended] = cancel
    try:
        yield
    finally:
        del _starts[has_ended]
        has_ended.set()
        if _is_exiting and threading.current_thread().daemon:
            threading.Event().wait()


def is_exiting() -> bool:
    """Whether the interpreter is exiting. Only daemon threads still run then."""
    return _is_exiting


@atexit.register
def _end_at_exit() -> None:
    """End the users of Ray before Ray itself ends.

    Exit hooks run in reverse order of their registration. Ray registered its own hook when it was imported, so this
    hook runs before Ray's. The exit hook of `weakref.finalize` might run after Ray's: it is registered with the
    program's first `finalize`, which may have been before Ray was imported.
    """
    global _is_exiting
    _is_exiting = True
    cancel_ray_alarm()
    auto_init_hook.enable_auto_connect = False  # a late call on a daemon thread would start another Ray
    deadline_s = time.monotonic() + _CANCEL_TIMEOUT_S
    for has_ended, cancel in list(_starts.items()):
        cancel()
        has_ended.wait(max(0.0, deadline_s - time.monotonic()))
    end_engines()


def _leave_to_parent() -> None:
    """In a forked child, do nothing about Ray at the end: its exit hooks wait for threads that only the parent has."""
    global _is_forked
    if _num_users == 0 and not _starts:
        return
    _is_forked = True
    _ends.clear()
    _starts.clear()
    atexit.unregister(_shutdown_ray)
    skip_exit_handlers()


os.register_at_fork(after_in_child=_leave_to_parent)


@wraps(_shutdown_ray)
def _shutdown_after_ends(**options: Any) -> None:
    end_engines()
    _shutdown_ray(**options)


def _connect(num_cpus: float) -> bool:
    address = os.environ.get("RAY_ADDRESS", "")
    if "://" in address:
        raise InitializationError(_ray_client_message(f"RAY_ADDRESS={address}"))
    if address and address != "local":
        if address != "auto":
            try:
                parse_address(address)
            except ValueError as error:
                raise InitializationError(f"RAY_ADDRESS={error}") from None
        if address == "auto":
            use_token_of_machine()
        _join(address, f"RAY_ADDRESS={address}", find_obstacle(address))
        return False
    started_here = None if address else address_of_last_start()
    if started_here is not None:
        use_token_of_machine()
        obstacle = find_obstacle(started_here)
        if obstacle is None or not obstacle.is_gone:
            # "auto", because the cluster may require this machine's token, for which Ray doesn't look if it gets an
            # address
            _join("auto", f"the cluster that `ray start` left at {started_here}", obstacle)
            return False
        logger.warning(
            "the Ray cluster last started on this machine (%s, from Ray's ray_current_cluster file) doesn't answer: it "
            "has crashed, or was ended without `ray stop`. Starting a local Ray instead; `ray stop` removes the file.",
            started_here,
        )
    try:
        _init(start_local_ray, num_cpus=math.ceil(num_cpus))
    except RaycoreError:
        raise
    except Exception as error:  # Ray raises anything
        cause = no_token().found if isinstance(error, AuthenticationError) else in_one_line(error)
        raise InitializationError(f"a local Ray can't start: {cause}") from error
    return True


def _join(address: str, source: str, obstacle: Obstacle | None) -> None:
    if obstacle is not None:
        raise InitializationError(obstacle.message(source, _REMEDY))
    try:
        _init(ray.init, address=address)
    except Exception as error:  # Ray raises anything
        raise InitializationError(Obstacle(in_one_line(error)).message(source, _REMEDY)) from error


def _init(start: Callable[..., Any], **options: Any) -> None:
    """Connect to Ray by `start(**options)`, without Ray's log lines, and keep the program's SIGTERM handler."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if in_main_thread else None
    start(logging_level=logging.ERROR, **options)
    # only the messages of Ray's start are hidden: later warnings concern this program
    logging.getLogger("ray").setLevel(logging.WARNING)
    # without a handler of the program's, Ray's own is set once more: as Ray sets it, it prints a stack like a crash's
    handler = handler if callable(handler) or not in_main_thread else signal.getsignal(signal.SIGTERM)
    if callable(handler):
        signal.signal(signal.SIGTERM, handler)


def address_of_last_start() -> str | None:
    """The address of the cluster that the last `ray start` on this machine has started or joined, if it is known."""
    from ray._private.utils import read_ray_address  # pyright: ignore[reportPrivateUsage]

    return read_ray_address() or None


def _refuse_ray_client() -> None:
    from ray.util.client import ray as client

    if client.is_connected():
        raise InitializationError(_ray_client_message("this process is connected to its cluster by Ray Client"))


def _ray_client_message(found: str) -> str:
    return (
        f"{found}, but Ray Client (ray://) can't stream results. Run this program on the cluster: "
        "with `ray job submit -- python ...`, or in a notebook on the head node"
    )
