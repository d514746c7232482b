"""Free ports, and addresses at which workers can rendezvous."""

from __future__ import annotations

import socket
from contextlib import ExitStack


def free_ports(host: str, count: int) -> list[int]:
    """`count` different TCP ports of this machine's address `host`. They are free when checked, but not reserved."""
    with ExitStack() as stack:
        ports: list[int] = []
        for _ in range(count):
            probe = stack.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
            probe.bind((host, 0))
            ports.append(probe.getsockname()[1])
        return ports


def address_of(host: str, port: int) -> str:
    """The address as `tcp://host:port`."""
    return f"tcp://{host}:{port}"
