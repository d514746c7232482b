"""What the bytes between an engine and its workers mean: calls, steps, and their replies.

A message is a header and a payload. Every worker replies to a call, even where its result isn't wanted, so that a
failure anywhere is known at once. To a step only the worker that has the result replies, and any that fails.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any, cast

import cloudpickle as _cloudpickle  # pyright: ignore[reportMissingTypeStubs]
import msgspec

from raycore.messages import StepPlan, StepResult

HEADER = struct.Struct("<BQ")
"""A message begins with its kind and the number of the call that it belongs to."""
HEADER_BYTES = HEADER.size
CALL, STEP, STOP = 1, 2, 3
"""Kinds of requests."""
VALUE, STEP_RESULT, CALL_ERROR, STEP_ERROR = 4, 5, 6, 7
"""Kinds of replies. An error's payload is the pickled pair of its summary and its traceback."""
ERRORS = frozenset({CALL_ERROR, STEP_ERROR})
NOT_WANTED = b"-"
"""In place of the value of a worker whose value nobody asked for."""
_PLAIN = frozenset({bytes, int, str, float, bool, type(None)})

cloudpickle: Any = _cloudpickle  # it has no types
encode_plan = msgspec.msgpack.Encoder().encode
decode_plan = msgspec.msgpack.Decoder(StepPlan).decode
encode_result = msgspec.msgpack.Encoder().encode
decode_result = msgspec.msgpack.Decoder(StepResult).decode


def encode_call(
    method: str | Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None, reply_rank: int | None
) -> bytes:
    """The payload of a call. Plain arguments take pickle's short way; the rest may need cloudpickle."""
    call = (method, tuple(args), kwargs, reply_rank)
    if not kwargs and type(method) is str and _PLAIN.issuperset(map(type, args)):
        return pickle.dumps(call, 5)
    return cloudpickle.dumps(call, 5)


def encode_value(value: object) -> bytes:
    """The payload of a call's reply."""
    if type(value) in _PLAIN or (type(value) in (tuple, list) and _PLAIN.issuperset(map(type, cast(Any, value)))):
        return pickle.dumps(value, 5)
    return cloudpickle.dumps(value, 5)
