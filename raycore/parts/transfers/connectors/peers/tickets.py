"""What an engine tells another one of a prompt's blocks, by way of callers.

The engine that has computed a prompt answers with a *ticket*, which the caller gives to the engine that goes on. Both
know a secret. With it, a ticket is encrypted and authenticated: callers can neither read addresses in it nor name ones
of their own. Blocks are found by the digests of the request's own tokens, whatever ticket comes with it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from raycore.errors import InvalidConfig
from raycore.parts.transfers.connectors.peers.hints import RemoteBlocks
from raycore.system import secrets

LEAST_SECRET_BYTES = 16
_NONCE_BYTES = _PROOF_BYTES = 16


class CallerParams(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """The keys of `kv_transfer_params`. vLLM's names, where it has them."""

    do_remote_decode: bool = False
    """Keep the prompt's blocks for another engine, and answer with what it needs to know."""
    do_remote_prefill: bool = False
    """Read the prompt's first blocks from the engine that has answered with `remote_ticket`."""
    remote_engine_id: str = ""
    """The `engine_id` of that engine."""
    remote_ticket: str = ""


def read_caller_params(params: dict[str, Any] | None) -> CallerParams:
    """Read what a caller says. Keys whose value is None count as missing.

    Raises:
        ValueError: a key is unknown, or its value has another type.
    """
    try:
        return msgspec.convert({key: value for key, value in (params or {}).items() if value is not None}, CallerParams)
    except msgspec.ValidationError as error:
        raise ValueError(f"{error}; known are {', '.join(CallerParams.__struct_fields__)}") from error


class Tickets:
    """Seals tickets, and opens those that an engine with the same secret has sealed."""

    def __init__(self, secret: bytes) -> None:
        self._encrypting, self._proving = (
            hashlib.blake2b(secret, digest_size=32, person=use).digest() for use in (b"ticket: mask", b"ticket: proof")
        )

    def seal(self, remote: RemoteBlocks) -> str:
        """Return a ticket that says where blocks are."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        content = nonce + self._masked(nonce, msgspec.msgpack.encode(remote))
        return base64.b64encode(self._proof(content) + content).decode()

    def open(self, ticket: str) -> RemoteBlocks:
        """Return what a ticket says. Raises ValueError if no engine with this secret has sealed it."""
        try:
            data = base64.b64decode(ticket, validate=True)
        except ValueError:  # not even base64
            data = b""
        content = data[_PROOF_BYTES:]
        if not hmac.compare_digest(data[:_PROOF_BYTES], self._proof(content)):
            raise ValueError("remote_ticket is none that an engine with this engine's secret has answered with")
        nonce, masked = content[:_NONCE_BYTES], content[_NONCE_BYTES:]
        try:
            return msgspec.msgpack.decode(self._masked(nonce, masked), type=RemoteBlocks)
        except msgspec.MsgspecError as error:
            raise ValueError(f"remote_ticket is of another version of raycore: {error}") from error

    def _masked(self, nonce: bytes, data: bytes) -> bytes:
        """Encrypt, or decrypt: a nonce is used for one ticket, so its mask is, too."""
        mask = hashlib.shake_256(self._encrypting + nonce).digest(len(data))
        return np.bitwise_xor(np.frombuffer(data, np.uint8), np.frombuffer(mask, np.uint8)).tobytes()

    def _proof(self, content: bytes) -> bytes:
        return hashlib.blake2b(content, digest_size=_PROOF_BYTES, key=self._proving).digest()


@lru_cache(16)
def tickets_of(secret_file: str | None) -> Tickets:
    """The tickets of an engine with the setting `secret_file`. A process reads it once. None: nobody knows the secret.

    Raises:
        InvalidConfig: the file can't be read, or has too short a secret.
    """
    if secret_file is None:
        return Tickets(secrets.token_bytes(LEAST_SECRET_BYTES))
    try:
        secret = Path(secret_file).read_bytes().strip()
    except OSError as error:
        raise InvalidConfig(f"kv_connector_extra_config: secret_file={secret_file!r} can't be read: {error}") from error
    if len(secret) < LEAST_SECRET_BYTES:
        raise InvalidConfig(
            f"kv_connector_extra_config: secret_file={secret_file!r} has {len(secret)} bytes, fewer than "
            f"{LEAST_SECRET_BYTES}: write random ones into it, for example those of 'openssl rand -hex 32'"
        )
    return Tickets(secret)
