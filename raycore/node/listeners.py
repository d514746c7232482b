"""Sockets on which this process listens before it tells others the address.

A port that is only probed may be another program's when it is needed. So whoever names an address to others listens
there already, and hands the socket to the code of this process that uses it.
"""

from __future__ import annotations

from raycore.node.ports import address_of
from raycore.system import socket

_BACKLOG = 4096
_offered: dict[str, socket.socket] = {}
"""By address. A module's variable, because sockets are the process's: whoever names an address doesn't know who will
use it."""


def listen(host: str) -> socket.socket:
    """Listen on a free port of `host`, an address of this machine. Raises OSError if it isn't."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=_BACKLOG)


def offer(host: str) -> str:
    """Listen on a free port of `host`, and keep the socket until `claim`.

    Returns: the address `tcp://host:port`, which other processes can connect to from now on.
    """
    listener = listen(host)
    address = address_of(host, listener.getsockname()[1])
    _offered[address] = listener
    return address


def claim(address: str) -> socket.socket:
    """The socket that `offer` has opened. Raises ValueError if this process hasn't offered `address`, or did once."""
    listener = _offered.pop(address, None)
    if listener is None:
        raise ValueError(f"this process doesn't listen at {address}: offer() gives addresses, each for one claim()")
    return listener
