"""Makes the processes of an engine run one copy of raycore: the one that the driver imported.

By itself, Ray doesn't ensure that. It puts the driver's directory, and a job's `working_dir` and `py_modules`, on
its workers' `sys.path`. If one of them holds another copy, such as a clone without compiled kernels, the workers import
that. And the nodes of a cluster may have other versions installed.

So an actor's class is pickled with a call of `load`, which runs in the worker before anything of raycore is imported
there. It has raycore imported from the driver's folder, if the node has that, and otherwise compares the copies. The
copy that a worker would import may be any version, so `load` doesn't rely on it: it is itself pickled by value, with
the functions that it calls. They use the standard library only, and nothing of this module that can't be pickled.
"""

from __future__ import annotations

import json
import os
import pickle
import platform
import sys
from hashlib import blake2b
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import SimpleNamespace
from typing import Any, TypeAlias

PACKAGES = ("raycore", "placement")

Copy: TypeAlias = tuple[str, str, str, str]
"""A copy of raycore: the folder with the packages; the version; a digest of the sources, empty if there are none to
read, as in a zip archive; and a digest of what the file system says of the source files. If the last is equal, the
files are the same ones, unchanged, on one machine."""

_own: Copy | None = None


def own_copy() -> Copy:
    """The copy that this process runs. The first call reads the sources, which takes milliseconds."""
    if _own is None:
        remember(_read_copy())
    assert _own is not None
    return _own


def remember(copy: Copy) -> None:
    """Have `own_copy()` return `copy`, without reading the sources."""
    global _own
    _own = copy


def difference(theirs: Copy, ours: Copy, them: str, us: str) -> str | None:
    """Why two copies must not be used together, in one line. None if they are the same.

    `them`, `us`: whose copies they are.
    """
    # other versions may say more of a copy
    (their_version, their_digest), (our_version, our_digest) = theirs[1:3], ours[1:3]
    if their_version != our_version:
        what = "versions"
    elif their_digest and our_digest and their_digest != our_digest:
        what = "contents"
    else:
        return None
    return (
        f"two copies of raycore with different {what} can't work together: {them} imported {_name(theirs)}, {us} "
        f"imported {_name(ours)}. Install the same raycore in both places, and restart what had imported another one"
    )


def load(theirs: Copy, pickled: bytes, methods: list[str]) -> Any:
    """Have this process, a worker, import the driver's copy if it can, and unpickle an actor's class or an argument.

    Returns: the class or argument. If this process imports another copy: a class whose `methods` all raise
    InitializationError.

    Raises:
        ImportError: this process imports another copy, and `methods` is empty.
    """
    us = f"a worker on {platform.node()}"
    if "raycore" in sys.modules:
        us += ", before the engine started,"
    else:
        _import_from(theirs[0])
    # known if this process has loaded something before; another version may lack the variable
    ours = getattr(sys.modules.get("raycore.same_copy"), "_own", None) or _read_copy(theirs)
    problem = difference(theirs, ours, "the driver", us)
    if problem is not None:
        return _refusal(problem, methods)
    import_module("raycore.same_copy").remember(ours)
    return pickle.loads(pickled)


def seal(message: bytes) -> bytes:
    """`message`, for a process that may run another copy, after a line that says which copy has encoded it."""
    return json.dumps(own_copy()).encode() + b"\n" + message


def unseal(sealed: bytes, sender: str, error: type[Exception]) -> bytes:
    """The message that `seal()` got.

    Raises:
        error: the message isn't from the copy that this process runs. Its fields may differ from those known here, and
            would be ignored or get their defaults.
    """
    line, _, message = sealed.partition(b"\n")
    try:
        theirs: Copy = tuple(json.loads(line))
    except ValueError:
        theirs = "a folder that it doesn't tell", "of another version", "", ""
    problem = difference(theirs, own_copy(), sender, "this process")
    if problem is not None:
        raise error(problem)
    return message


def _import_from(folder: str) -> None:
    """Have raycore's packages, and no others, imported from `folder` if it has them."""

    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, [folder]) if name in PACKAGES else None
        return spec if spec is not None and spec.origin is not None else None  # a folder without __init__.py is no copy

    sys.meta_path.insert(0, SimpleNamespace(find_spec=find_spec))  # pyright: ignore[reportArgumentType]


def _read_copy(theirs: Copy | None = None) -> Copy:
    """The copy that this process imports, or has imported. Doesn't read sources that are the files of `theirs`."""
    module = import_module("raycore")
    folder = os.path.dirname(os.path.dirname(os.path.abspath(str(module.__file__))))
    files = _source_files(folder)
    identity = _file_digest(files)
    digest = theirs[2] if theirs is not None and identity == theirs[3] else _content_digest(folder, files)
    return folder, module.__version__, digest, identity


def _source_files(folder: str) -> list[str]:
    found: list[str] = []
    for package in PACKAGES:
        for parent, folders, names in os.walk(os.path.join(folder, package)):
            folders[:] = [name for name in folders if name != "__pycache__"]
            found += [os.path.join(parent, name) for name in names if name.endswith(".py")]
    return sorted(found)


def _content_digest(folder: str, files: list[str]) -> str:
    digest = blake2b(digest_size=16)
    for path in files:
        with open(path, "rb", buffering=0) as file:
            content = file.read()
        digest.update(f"{os.path.relpath(path, folder)} {len(content)} ".encode() + content)
    return digest.hexdigest() if files else ""


def _file_digest(files: list[str]) -> str:
    # no tool can set when the kernel changed a file last, so two machines don't have the same times
    seen = [(path, at.st_ino, at.st_size, at.st_ctime_ns) for path in files for at in [os.stat(path)]]
    return blake2b(repr(seen).encode(), digest_size=16).hexdigest()


def _name(copy: Copy) -> str:
    return f"raycore {copy[1]} (sources {copy[2][:8] or 'unknown'}) from {copy[0]}"


def _refusal(problem: str, methods: list[str]) -> type[Any]:
    if not methods:
        raise ImportError(problem)

    def refuse(self: object, *args: object, **kwargs: object) -> None:
        raise import_module("raycore.errors").InitializationError(problem)

    def accept(self: object, *args: object, **kwargs: object) -> None:
        """Ray ends a process whose actor can't be created with a C++ stack trace."""

    return type("OtherCopy", (), {"__init__": accept} | dict.fromkeys(methods, refuse))
