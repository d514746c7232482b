"""Sockets as far as they show whether somebody is there: who listens, who takes connections, who has ended."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from simulation.world import descriptors
from simulation.world.kernel import Process, pause
from simulation.world.threads import world

Address = Any
"""(host, port), or the path of a Unix socket."""

_LEAST_S, _MOST_S = 2e-5, 5e-4


class Listener:
    """Listens at an address."""

    def __init__(self, process: Callable[[], Process], is_silent: Callable[[], bool] = lambda: False) -> None:
        """
        Args:
            process: whose socket it is. While it is stopped, connections are taken nevertheless.
            is_silent: whether its machine has crashed, so that nobody even refuses a connection.
        """
        self.process = process
        self.is_silent = is_silent
        self.queue: Any = None
        """The connections that it hasn't accepted. None: nobody looks at them, and nothing is sent."""


def listen(systems: dict[str, Any], address: Address, listener: Listener) -> None:
    """`systems`: the world's."""
    systems.setdefault("listeners", {})[address] = listener


class End(descriptors.Descriptor):
    """A process's descriptor of a socket, which is readable when the other end has ended."""

    def __init__(self, socket: Socket) -> None:
        super().__init__()
        self.socket = socket


class Socket:
    """A socket over which nothing is sent. Its process has a descriptor of it until it is closed."""

    def __init__(self, family: int = 0, type: int = 0, proto: int = 0) -> None:
        self._timeout_s: float | None = None
        self._descriptor = End(self)
        self._number: int | None = descriptors.add(self._descriptor)
        self._address: Address = None
        self._is_connected = False

    @property
    def is_used(self) -> bool:
        """Whether it listens or is connected, though the other end may be gone."""
        return self._is_connected or self._address is not None

    @property
    def has_ended(self) -> bool:
        """Whether the other end of its connection is closed."""
        return False

    def settimeout(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s

    def connect(self, address: Address) -> None:
        here = world()
        draws = here.systems.setdefault("ways of connections", here.generator("ways of connections"))
        here.park("a connection", draws.uniform(_LEAST_S, _MOST_S))
        listener: Listener | None = here.systems.get("listeners", {}).get(address)
        if listener is None and isinstance(address, str):
            raise FileNotFoundError(2, "No such file or directory")
        if listener is not None and listener.is_silent():
            here.park("a connection", self._timeout_s)
            raise TimeoutError("timed out")
        if listener is None or listener.process().has_ended:
            raise ConnectionRefusedError(111, "Connection refused")
        end, self._is_connected = self._descriptor, True
        listener.process().on_end.append(lambda _: here.call_later(_LEAST_S, end.show))

    def serve(self, address: tuple[str, int]) -> None:
        here = world()
        assert here.current is not None
        process = here.current.process
        ports = here.systems.setdefault("free ports", itertools.count(40_000))
        self._address = address[0], address[1] or next(ports)
        listen(here.systems, self._address, Listener(lambda: process))

    def getsockname(self) -> tuple[str, int]:
        return self._address

    def fileno(self) -> int:
        assert self._number is not None
        return self._number

    def forget(self) -> None:
        """Close it, and let nobody else run."""
        if self._number is not None:
            descriptors.forget(self._number)
            self._number = None

    def close(self) -> None:
        self.forget()
        if self._is_connected:
            self._is_connected = False
            pause()
        if self._address is not None:
            world().systems["listeners"].pop(self._address, None)
            self._address = None
        pause()
