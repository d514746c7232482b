"""Finds the Ray clusters to which this machine belongs, and joins them."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ray.exceptions import RayError

from raycore.cluster.joining import Obstacle, address_for_ray, find_obstacle, in_one_line
from raycore.control.commands import NAMESPACE
from raycore.errors import ControlError
from raycore.ray_api import TOKEN_VARIABLE, connect, disconnect, token_of_machine
from raycore.system import os

_GCS_FLAG = "--gcs-address="

_REFUSAL_S = 1.0
"""How long to wait, in seconds, for an address of this machine to refuse connections. That takes milliseconds."""


def clusters_to_search(address: str, proc: Path = Path("/proc")) -> list[str]:
    """The addresses of the clusters that may run the engine.

    Args:
        address: `host:port`. Or `auto`: the cluster that RAY_ADDRESS names, or else all that have a node of this user
            on this machine.

    Raises:
        ControlError: `local`, or an address of Ray's client, which raycore doesn't support.
    """
    asked = os.environ.get("RAY_ADDRESS") or address if address == "auto" else address
    if asked == "local":
        raise ControlError("address 'local' would start a new Ray cluster: give the address of the engine's cluster")
    if "://" in asked:
        raise ControlError(
            f"address {asked!r} isn't supported: run this on a node of the cluster, and give its address as HOST:PORT"
        )
    if asked != "auto":
        return [asked]
    return [each for each in sorted(_clusters_here(proc)) if not _is_gone(each)] or ["auto"]


@contextmanager
def connected(address: str) -> Generator[None, None, None]:
    """Join the cluster at `address` while the block runs. Takes a second.

    Args:
        address: `host:port`, or `auto`: the one that Ray finds on this machine.

    Raises:
        ControlError: there is no such cluster, or this process can't join it.
    """
    with ExitStack() as joined:
        try:
            with suppress(ConnectionError, ValueError):  # of an address that `find_obstacle()` refuses
                token = _clusters_here().get(address_for_ray(address))
                if token is not None:
                    joined.enter_context(token_of_machine(token))
            obstacle = find_obstacle(address)
            if obstacle is None:
                connect(address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        except (RayError, OSError, RuntimeError, ValueError) as error:
            raise ControlError(_unjoined(address, Obstacle(in_one_line(error)))) from error
        if obstacle is not None:
            raise ControlError(_unjoined(address, obstacle))
        joined.callback(disconnect)
        yield


def _unjoined(address: str, obstacle: Obstacle) -> str:
    remedy = "Run this on a node of the engine's cluster, or name it with --address HOST:PORT"
    if os.environ.get("RAY_ADDRESS") == address:
        remedy = f"RAY_ADDRESS={address} names it: set it to the engine's cluster, or give --address HOST:PORT"
    if obstacle.is_gone or address == "auto":
        return f"no Ray cluster at address {address!r}: {obstacle.found}. {remedy}"
    return obstacle.message(f"the Ray cluster at {address}", remedy)


def _is_gone(address: str) -> bool:
    obstacle = find_obstacle(address, _REFUSAL_S)
    return obstacle is not None and obstacle.is_gone


def _clusters_here(proc: Path = Path("/proc")) -> dict[str, str]:
    """The addresses with which this user's raylets, one for each node, run on this machine. Empty without /proc.

    The values are the tokens in the raylets' environment, or else empty.
    """
    found: dict[str, str] = {}
    for process in proc.glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if process.stat().st_uid != os.getuid():
                continue
            arguments = _strings(process / "cmdline")
            if Path(arguments[0]).name == "raylet":
                address = _value_of(_GCS_FLAG, arguments)
                found.setdefault(address, "")
                found[address] = _value_of(f"{TOKEN_VARIABLE}=", _strings(process / "environ")) or found[address]
    return found


def _strings(file: Path) -> list[str]:
    return os.fsdecode(file.read_bytes()).split("\0")


def _value_of(name: str, strings: Sequence[str]) -> str:
    return next((each.removeprefix(name) for each in strings if each.startswith(name)), "")
