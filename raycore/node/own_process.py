"""Objects that work only in the process that made them, such as engines.

A forked child has a copy of each, without the threads and connections that it needs, while the original goes on in the
parent. So in the child, the copies' use raises an error that says how to reach an engine, and their end does nothing.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakValueDictionary

from raycore.errors import ControlError, InvalidInput
from raycore.system import os

if TYPE_CHECKING:
    from typing_extensions import Self

_HOW = "call an actor that has the engine, or its server (docs/engines-in-actors.md)"


class OwnProcess:
    """Base class of such objects. They can't be pickled either."""

    def __new__(cls, *args: Any, **options: Any) -> Self:
        made = super().__new__(cls)
        _made[id(made)] = made
        return made

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        # no TypeError, of which Ray makes a page about serialization
        raise InvalidInput(f"{type(self).__name__} can't be copied, pickled or sent to another process: {_HOW}")

    def _disown(self) -> None:
        """Called in a forked child, before anything else uses the copy: detach what would end the original."""


class _Copy:
    """The first base class of a copy in a forked child. `_owner`: the process that has the original."""

    _owner: int

    def __init_subclass__(cls, **options: object) -> None:
        """Do nothing: the original's class may ask for options."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        if name in _ENDS:
            return _do_nothing
        kind = type(self)
        raise ControlError(
            f"this {kind.__name__} belongs to process {kind._owner}, from which process {os.getpid()} was forked: use "
            f"multiprocessing's 'spawn', and {_HOW}"
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of process {type(self)._owner}>"

    def __exit__(self, *error: object) -> None:
        """Do nothing."""


_ENDS = {"shutdown", "close"}
_made: WeakValueDictionary[int, OwnProcess] = WeakValueDictionary()
"""By id, because users' subclasses may compare by value."""


def keep_for_ever(held: object) -> None:
    """Never free `held`, also not at the end of the process: in a forked child, C++ may wait there for its threads."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


def _do_nothing(*args: object, **options: object) -> None:
    pass


def _disown_all(owner: int) -> None:
    for made in list(_made.values()):
        made._disown()  # pyright: ignore[reportPrivateUsage]
        made.__class__ = type(type(made).__name__, (_Copy, type(made)), {"_owner": owner})
    _made.clear()


os.register_at_fork(after_in_child=lambda: _disown_all(os.getppid()))
