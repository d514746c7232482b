"""Finds free ports, and reads and formats addresses."""

from __future__ import annotations

from contextlib import ExitStack

from raycore.system import socket

MAX_PORT = 65535


def free_ports(host: str, count: int) -> list[int]:
    """Return `count` different TCP ports at `host`, an address of this machine.

    They are free now, but not reserved: for callers of other programs that take only numbers. See `listeners`.
    """
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


def joined(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(text: str) -> tuple[str, int]:
    """The host and the port of `host:port`. Raises ValueError if `text` isn't that, or no server can have the port."""
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) <= MAX_PORT):
        raise ValueError(f"{text!r} isn't HOST:PORT with a port from 1 to {MAX_PORT}")
    return host.strip("[]"), int(port)


def takes_connections(address: str, timeout_s: float = 1.0) -> bool:
    """Whether something listens at `address` (`host:port`), and takes a connection within `timeout_s` seconds."""
    try:
        socket.create_connection(parse_address(address), timeout_s).close()
    except OSError:
        return False
    return True
