"""Decodes clients' requests. One that can't be decoded fails alone."""

from __future__ import annotations

import msgspec

from raycore.messages import EngineRequest

_decode_requests = msgspec.msgpack.Decoder(list[EngineRequest]).decode
_decode_each = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode


def decode_requests(message: bytes) -> tuple[list[EngineRequest], list[tuple[int, str]]]:
    """Decode a client's message: an encoded list of `EngineRequest`.

    Returns: the requests, and (seq_id, reason) of those that can't be decoded.

    Raises:
        msgspec.DecodeError: the message isn't an encoded list, or one of its items doesn't begin with a seq_id.
    """
    try:
        return _decode_requests(message), []
    except msgspec.DecodeError:
        return _decode_one_by_one(_decode_each(message))


def _decode_one_by_one(messages: list[msgspec.Raw]) -> tuple[list[EngineRequest], list[tuple[int, str]]]:
    requests: list[EngineRequest] = []
    undecodable: list[tuple[int, str]] = []
    for message in messages:
        try:
            requests.append(msgspec.msgpack.decode(message, type=EngineRequest))
        except msgspec.DecodeError as error:
            seq_id = msgspec.msgpack.decode(message, type=_Identified).seq_id
            undecodable.append((seq_id, f"the engine can't decode the request: {error}"))
    return requests, undecodable


class _Identified(msgspec.Struct, array_like=True):
    """Decodes only the first field of an encoded `EngineRequest`, its seq_id. Other fields may be invalid."""

    seq_id: int
