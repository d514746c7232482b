"""What `ConstraintGate` has its process check with in tests: it does what a constraint's pattern says."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence

from raycore.errors import InvalidRequest
from raycore.structured_outputs import StructuredOutputsParams


def checker(tokenizer_dir: str, vocab_size: int, eos_token_ids: Sequence[int]) -> Callable[..., None]:
    """See `GateOrder.checker`. Patterns: a verb, and its argument after a blank."""
    if tokenizer_dir == "deadly":
        os.kill(os.getpid(), signal.SIGKILL)

    def check(asked: StructuredOutputsParams) -> None:
        verb, _, argument = str(asked.regex).partition(" ")
        _ACTIONS[verb](argument)

    return check


def _crash(argument: str) -> None:
    ctypes.string_at(0)


def _run_short_of_memory(argument: str) -> None:
    os.write(2, b"memory allocation of 99 bytes failed\n")
    os.abort()


def _allocate(argument: str) -> None:
    bytearray(int(argument))


def _refuse(argument: str) -> None:
    raise InvalidRequest(argument)


def _spin(argument: str) -> None:
    while True:
        pass


def _touch(argument: str) -> None:
    with open(argument, "a") as file:
        file.write(f"{os.getpid()}\n")


def _touch_and_sleep(argument: str) -> None:
    _touch(argument)
    time.sleep(60)


def _touch_and_spin(argument: str) -> None:
    _touch(argument)
    _spin("")


def _kill_parent(argument: str) -> None:
    if not os.path.exists(argument):
        _touch(argument)
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)


def _import(argument: str) -> None:
    names = [name for name in argument.split() if name in sys.modules]
    if names:
        raise InvalidRequest(f"imported: {names}")


_ACTIONS: dict[str, Callable[[str], object]] = {
    "pass": lambda argument: None,
    "crash": _crash,
    "run-short": _run_short_of_memory,
    "allocate": _allocate,
    "refuse": _refuse,
    "spin": _spin,
    "sleep": lambda argument: time.sleep(float(argument)),
    "touch": _touch,
    "touch-and-sleep": _touch_and_sleep,
    "touch-and-spin": _touch_and_spin,
    "kill-parent": _kill_parent,
    "imports": _import,
    "kill-itself": lambda argument: os.kill(os.getpid(), signal.SIGKILL),
    "raise": lambda argument: [][1],
}
