"""What an object consists of, for walks that look for tensors in networks."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any, cast

from torch import nn

_LIBRARIES = ("builtins", "torch", "triton", "numpy")
"""Modules whose objects have no weights, except for containers, tensors, and modules of networks."""


def named_parts(each: Any) -> Iterator[tuple[object, object]]:
    """Yield the objects that `each` refers to, with names that are the same in another object made by the same code.

    Follows attributes, containers, partial functions, bound methods, and the variables of nested functions.
    """
    if isinstance(each, dict):
        yield from cast(dict[object, object], each).items()
    elif isinstance(each, (list, tuple, set, frozenset)):
        yield from enumerate(cast(Iterable[object], each))
    elif isinstance(each, functools.partial):
        yield from enumerate([each.func, *each.args])
        yield from each.keywords.items()
    elif isinstance(each, types.MethodType):
        yield "__self__", each.__self__
    elif isinstance(each, types.FunctionType):
        for name, cell in zip(each.__code__.co_freevars, each.__closure__ or (), strict=True):
            if _is_set(cell):
                yield name, cell.cell_contents
    elif isinstance(each, nn.Module) or type(each).__module__.partition(".")[0] not in _LIBRARIES:
        yield from getattr(each, "__dict__", {}).items()
        for name in (name for kind in type(each).__mro__ for name in _slots(kind)):
            if hasattr(each, name):
                yield name, getattr(each, name)


def _slots(kind: type) -> list[str]:
    names = kind.__dict__.get("__slots__", ())
    return [names] if isinstance(names, str) else [name for name in names if not name.startswith("__")]


def _is_set(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
