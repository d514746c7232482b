"""Loads the native kernels."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from functools import cache
from pathlib import Path

import torch

from raycore.kernels import VARIABLE, compiled

logger = logging.getLogger(__name__)


@cache
def load() -> str | None:
    """Register the kernels with torch, once per process.

    Returns: the instruction set that they use. None if they can't be used: the reason is logged.
    """
    choice = os.environ.get(VARIABLE, "auto")
    if choice == "none":
        return None
    try:
        return _load(choice)
    except _Unusable as error:
        logger.warning("%s. So plain torch computes, which is slower.", error)
        return None


def choose(instruction_set: str) -> str | None:
    """Use another instruction set from now on, after `load()`. Returns None if this processor hasn't got it."""
    return _name(_library().raycore_choose(instruction_set.encode()))


class _Unusable(Exception):
    """The kernels can't be used. The message says why."""


def _load(choice: str) -> str:
    name = choose(choice)
    if name is None:
        raise _Unusable(f"raycore has no kernels with the instruction set {choice!r} for this processor")
    libtorch = Path(torch.__file__).parent / "lib" / f"libtorch_cpu{'.dylib' if sys.platform == 'darwin' else '.so'}"
    reason = _name(_library().raycore_register(str(libtorch).encode()))
    if reason is not None:
        raise _Unusable(f"raycore's native kernels can't be registered: {reason}")
    return name


@cache
def _library() -> ctypes.CDLL:
    found = compiled()
    if not found:
        raise _Unusable(
            "raycore was installed without its native kernels, which GCC compiles: install g++, then raycore again"
        )
    try:
        library = ctypes.CDLL(str(found[0]))
    except OSError as error:
        raise _Unusable(f"raycore's native kernels can't be loaded: {error}") from error
    for function in (library.raycore_choose, library.raycore_register):
        function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_char_p
    return library


def _name(text: bytes | None) -> str | None:
    return None if text is None else text.decode()
