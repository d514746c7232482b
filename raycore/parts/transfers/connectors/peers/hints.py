"""What the `hints` of a request say of blocks on other ranks. vLLM's names, where it has them."""

from __future__ import annotations

import base64
from functools import lru_cache
from typing import Any

import msgspec

from raycore.parts.transfers.connectors.peers.wire import PeerAddress


class TransferParams(msgspec.Struct, omit_defaults=True):
    """The keys of `hints`."""

    do_remote_decode: bool = False
    """Compute the prompt and one token. The blocks stay until another rank has read them, or a lease ends."""
    do_remote_prefill: bool = False
    """Read the prompt's first blocks from `remote_workers`."""
    remote_engine_id: str = ""
    remote_workers: list[str] = []
    """The address of each worker of the rank that has the blocks: `address_text`."""
    remote_num_tokens: int = 0
    """How many tokens, in full blocks."""
    remote_lease: str = ""
    """What the blocks are kept for. Empty: nothing, they may go at any time."""
    is_cheapest: bool = False
    """Whether to read them without asking whether computing them takes less time."""


def read_params(params: dict[str, Any] | None) -> TransferParams | None:
    """Read what a request says. None: it says nothing that these connectors know.

    Raises:
        ValueError: a known key has a value of another type.
    """
    if not params or not (params.get("do_remote_decode") or params.get("do_remote_prefill")):
        return None
    try:
        return msgspec.convert({name: value for name, value in params.items() if value is not None}, TransferParams)
    except msgspec.ValidationError as error:
        raise ValueError(f"hints: {error}") from error


def as_params(params: TransferParams) -> dict[str, Any]:
    """The inverse of `read_params`."""
    return msgspec.to_builtins(params)


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
