"""What processes send to each other: its boundaries, and values that are copied on the way."""

from __future__ import annotations

import enum
import pickle
from dataclasses import dataclass
from typing import Any

import cloudpickle

from simulation.world import threads
from simulation.world.kernel import Process


class Boundary(enum.Enum):
    """The moments of a message at which a fault makes a difference."""

    BEFORE = "before it is sent"
    SENT = "sent"
    """A sender that ends now takes the message with it."""
    RECEIVED = "received"
    """A receiver that ends now has received it, and done nothing."""
    ANSWERED = "answered"
    """A receiver that ends now has done what was asked, and may take the answer with it."""
    HEARD = "heard"
    """The answer has come. A sender that ends now knows nothing of it."""


@dataclass(eq=False)
class Message:
    """A message between two processes, or between a process and the control store."""

    kind: str
    what: str
    size: int
    """Bytes."""
    sender: Process | None
    receiver: Process | None = None
    """None: the control store, or not known yet."""


_PLAIN = {bytes: len, str: len, int: lambda _: 8, float: lambda _: 8, bool: lambda _: 1, type(None): lambda _: 1}
"""Types whose values nobody can change, so that they need no copy. How many bytes a value has."""

_context = threads.local()
"""What the value refers to that this thread pickles or unpickles: handles and refs, which have no bytes."""


class Packed:
    """A value on its way to another process."""

    __slots__ = ("_contained", "_data", "_value", "size")

    def __init__(self, value: Any) -> None:
        self._contained: list[Any] = []
        self._data: bytes | None = None
        self._value: Any = None
        measure: Any = _PLAIN.get(type(value))
        if measure is not None:
            self._value, self.size = value, measure(value)
            return
        outer = getattr(_context, "contained", None)
        _context.contained = self._contained
        try:
            try:
                self._data = pickle.dumps(value, 5)
            except (pickle.PicklingError, AttributeError, TypeError):  # a function or class without a name
                self._contained.clear()
                self._data = cloudpickle.dumps(value)
        finally:
            _context.contained = outer
        self.size = len(self._data)

    def unpack(self) -> Any:
        """The value, for this process alone."""
        if self._data is None:
            return self._value
        outer = getattr(_context, "contained", None)
        _context.contained = self._contained
        try:
            return pickle.loads(self._data)
        finally:
            _context.contained = outer


def note(contained: Any) -> int:
    """Let `contained` travel beside the bytes of the value that this thread pickles. Returns its place."""
    beside = getattr(_context, "contained", None)
    if beside is None:
        raise TypeError("a handle or ref of the simulated Ray can only be pickled in one of its messages")
    beside.append(contained)
    return len(beside) - 1


def noted(place: int) -> Any:
    return _context.contained[place]
