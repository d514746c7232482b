"""Finds the Ray clusters to which this machine belongs, and joins them."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from raycore.cluster.connection import address_of_last_start, why_unreachable
from raycore.control.commands import NAMESPACE
from raycore.errors import ControlError
from raycore.ray_api import connect, disconnect, use_token_of_machine

_GCS_FLAG = "--gcs-address="


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
    found = sorted(set(_addresses_here(proc)))
    return [each for each in found if why_unreachable(each) is None] or ["auto"]


@contextmanager
def connected(address: str) -> Generator[None, None, None]:
    """Join the cluster at `address` while the block runs. Takes a second.

    Args:
        address: `host:port`, or `auto`: the one that Ray finds on this machine.

    Raises:
        ControlError: there is no such cluster.
    """
    known = address_of_last_start() if address == "auto" else address
    reason = None if known is None else why_unreachable(known)
    try:
        if reason is not None:
            raise ConnectionError(reason)
        if address in _addresses_here():
            use_token_of_machine()
        connect(address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ControlError(
            f"no Ray cluster at address {address!r}: {error}\n"
            "Run this on a node of the engine's cluster, or name it with --address HOST:PORT"
        ) from error
    try:
        yield
    finally:
        disconnect()


def _addresses_here(proc: Path = Path("/proc")) -> Iterator[str]:
    """The addresses with which this user's raylets, one for each node, run on this machine. None without /proc."""
    for process in proc.glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if process.stat().st_uid != os.getuid():
                continue
            arguments = os.fsdecode((process / "cmdline").read_bytes()).split("\0")
            if Path(arguments[0]).name == "raylet":
                yield from (each.removeprefix(_GCS_FLAG) for each in arguments if each.startswith(_GCS_FLAG))
