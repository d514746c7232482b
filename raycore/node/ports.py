"""Finds free ports, and formats addresses at which workers connect to each other."""

from __future__ import annotations

import socket
from contextlib import ExitStack


def free_ports(host: str, count: int) -> list[int]:
    """Return `count` different TCP ports at `host`, an address of this machine. They are free, but not reserved."""
    with ExitStack() as stack:
        ports: list[int] = []
        for _ in range(count):
            probe = stack.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
            probe.bind((host, 0))
            ports.append(probe.getsockname()[1])
        return ports


def address_of(host: str, port: int) -> str:
    """Return `tcp://host:port`."""
    return f"tcp://{host}:{port}"
