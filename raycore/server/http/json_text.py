"""Encodes what the server writes as JSON, so that every client can read it."""

from __future__ import annotations

from typing import Any, cast

import msgspec

_encode = msgspec.json.Encoder().encode


def to_json(value: Any) -> bytes:
    """A plain value or msgspec Struct as JSON in UTF-8.

    What JSON can't express is replaced: infinities and nan by null, halves of surrogate pairs by `?`.
    """
    try:
        return _encode(value)
    except UnicodeEncodeError:
        return _encode(_with_whole_characters(msgspec.to_builtins(value)))


def _with_whole_characters(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return {_with_whole_characters(key): _with_whole_characters(each) for key, each in items}
    if isinstance(value, list | tuple):
        return [_with_whole_characters(each) for each in cast("list[Any]", value)]
    return value
