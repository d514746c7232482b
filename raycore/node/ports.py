"""Addresses where workers can meet."""

from __future__ import annotations

import socket
from contextlib import ExitStack


def free_ports(host: str, count: int) -> list[int]:
    """Different ports of this machine's address `host`, free a moment ago."""
    with ExitStack() as stack:
        ports: list[int] = []
        for _ in range(count):
            probe = stack.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
            probe.bind((host, 0))
            ports.append(probe.getsockname()[1])
        return ports


def address_of(host: str, port: int) -> str:
    """As `tcp://host:port`."""
    return f"tcp://{host}:{port}"
