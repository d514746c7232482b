"""Loads the native kernels."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

from raycore.kernels import FOLDER, RECORD, VARIABLE, build_record, compiled

logger = logging.getLogger(__name__)

_COMPILE = f"Install raycore on this machine, or anywhere with {VARIABLE}=all, which compiles them for every processor"


@cache
def load() -> str | None:
    """Register the kernels with torch, once per process.

    Returns: the instruction set that they use. None if they can't be used: the reason is logged.
    """
    choice = os.environ.get(VARIABLE, "auto")
    if choice == "all":  # what was to be compiled
        choice = "auto"
    if choice == "none":
        return None
    try:
        return _load(choice)
    except _Unusable as error:
        logger.warning(
            "raycore, imported from %s, can't use its native kernels: %s. Plain torch computes, which is slower. %s.",
            FOLDER.parent,
            error,
            error.remedy,
        )
        return None


def choose(instruction_set: str) -> str | None:
    """Use another instruction set from now on, after `load()`. Returns None if this processor hasn't got it."""
    return _name(_library().raycore_choose(instruction_set.encode()))


def link_recordings(first: int, second: int) -> None:
    """Say which recording follows another one, so that `replay` can replay both. Numbers are of `end_recording`."""
    _library().raycore_link_recordings(first, second)


def delete_recording(number: int) -> None:
    """Forget what `end_recording` has returned."""
    _library().raycore_delete_recording(number)


def find() -> Path:
    """The library that was compiled when raycore was installed."""
    if found := compiled(FOLDER):
        return found[0]
    record, root = build_record(FOLDER), FOLDER.parents[1]
    if failure := record.get("failure"):
        details = f"; {FOLDER / RECORD} has the compiler's output" if record.get("output") else ""
        raise _Unusable(failure, f"To get them, {record['remedy']}{details}")
    is_checkout = (root / "pyproject.toml").exists()
    install = f"run `pip install -e {root}`" if is_checkout else "install raycore on this machine"
    raise _Unusable("they were never compiled for this copy", f"To get them, {install}, or import an installed raycore")


class _Unusable(Exception):
    """The kernels can't be used. The message says why, and `remedy`, a sentence, what to do."""

    def __init__(self, why: str, remedy: str) -> None:
        super().__init__(why)
        self.remedy = remedy


def _load(choice: str) -> str:
    name = choose(choice)
    missing = _missing()
    if missing is not None and name is None:
        raise _Unusable(f"those for {missing}, which this processor has, were not compiled: {_compiled()}", _COMPILE)
    if missing is not None:
        logger.warning(
            "raycore, imported from %s, uses its native kernels for %s. Those for %s, which this processor has, and "
            "which are faster, were not compiled: %s. %s.",
            *(FOLDER.parent, name, missing, _compiled(), _COMPILE),
        )
    if name is None and choice == "auto":
        needs = "AVX2, FMA and F16C" if platform.machine() == "x86_64" else "x86-64 or arm64"
        raise _Unusable(f"they need a processor with {needs}", "Nothing is wrong with the installation")
    if name is None:
        raise _Unusable(
            f"{VARIABLE}={choice}, which this processor hasn't got",
            f"Unset {VARIABLE} to use the best kernels that it has: {choose('auto') or 'none'}",
        )
    libtorch = Path(torch.__file__).parent / "lib" / f"libtorch_cpu{'.dylib' if sys.platform == 'darwin' else '.so'}"
    reason = _name(_library().raycore_register(str(libtorch).encode()))
    if reason is not None:
        raise _Unusable(f"torch {torch.__version__} doesn't take them: {reason}", f"Install {_needed_torch()}")
    return name


def _missing() -> str | None:
    """The best instruction set that the last `choose` could have used if the library had its kernels."""
    missing = getattr(_library(), "raycore_missing", None)  # a checkout's library may be older than its sources
    return None if missing is None else _name(missing())


def _compiled() -> str:
    return f"the library has kernels for {build_record(FOLDER).get('instruction_sets') or 'other processors'}"


def _needed_torch() -> str:
    try:
        return next(needed for needed in metadata.requires("raycore") or () if needed.startswith("torch"))
    except (metadata.PackageNotFoundError, StopIteration):
        return "a version of torch that raycore's pyproject.toml allows"


@cache
def _library() -> ctypes.CDLL:
    path = find()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        built_for = build_record(FOLDER).get("machine", "another machine")
        why = f"they were compiled for {built_for}, and this is {platform.machine()}"
        raise _Unusable(
            f"{path.name} can't be loaded ({error})" if built_for == platform.machine() else why,
            "Install raycore again, on this machine",
        ) from error
    for function in (library.raycore_choose, library.raycore_register):
        function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_char_p
    if hasattr(library, "raycore_missing"):
        library.raycore_missing.argtypes, library.raycore_missing.restype = [], ctypes.c_char_p
    library.raycore_link_recordings.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
    library.raycore_link_recordings.restype = None
    library.raycore_delete_recording.argtypes, library.raycore_delete_recording.restype = [ctypes.c_uint64], None
    return library


def _name(text: bytes | None) -> str | None:
    return None if text is None else text.decode()
