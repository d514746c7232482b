"""What the `hints` of a request say of blocks on other ranks."""

from __future__ import annotations

import base64
from functools import lru_cache
from typing import Any

import msgspec

from raycore.parts.transfers.connectors.peers.wire import PeerAddress


class RemoteBlocks(msgspec.Struct, omit_defaults=True):
    """Where a prompt's first blocks are."""

    workers: list[str]
    """The address of each worker of the rank that has them: `address_text`."""
    num_tokens: int
    """How many tokens, in full blocks."""
    lease: str = ""
    """What the blocks are kept for. Empty: nothing, they may go at any time."""
    is_cheapest: bool = False
    """Whether to read them without asking whether computing them takes less time."""
    engine_id: str = ""
    """The engine that has them. Empty: this one."""
    identity: str = ""
    """The identity of that engine's weights (`connectors.identity`), in hexadecimal digits."""


def read_hints(hints: dict[str, Any] | None) -> RemoteBlocks | None:
    """Read what a request's hints say. None: there are none."""
    return None if hints is None else msgspec.convert(hints, RemoteBlocks)


def as_hints(remote: RemoteBlocks) -> dict[str, Any]:
    """The inverse of `read_hints`."""
    return msgspec.to_builtins(remote)


def address_text(address: PeerAddress) -> str:
    """An address as text, for JSON."""
    return base64.b64encode(msgspec.msgpack.encode(address)).decode()


@lru_cache(1024)
def parse_address(text: str) -> PeerAddress:
    """The inverse of `address_text`. Raises ValueError if `text` is no address."""
    try:
        return msgspec.msgpack.decode(base64.b64decode(text, validate=True), type=PeerAddress)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ValueError(f"{text!r} isn't the address of a worker: {error}") from error
