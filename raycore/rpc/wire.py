"""The format of the messages between an engine and its workers: calls, steps and their replies.

A message is a header and a payload. To a call, every worker replies, even if its result is not wanted, so that the
engine learns of every failure at once. To a step, only the worker that returns the result replies, and any worker that
fails, unless all workers are asked to reply.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any, cast

import cloudpickle as _cloudpickle  # pyright: ignore[reportMissingTypeStubs]
import msgspec

from raycore.messages import GrammarOutput, StepPlan, StepResult

HEADER = struct.Struct("<BQ")
"""The kind of a message, and the number of the call or step to which it belongs."""
HEADER_BYTES = HEADER.size
CALL, STEP, STOP, STEP_FOR_ALL, SAMPLE = 1, 2, 3, 8, 9
"""Kinds of requests. To STEP_FOR_ALL, every worker replies. SAMPLE brings the masks of the last step, which was masked
and has the same number. The step's replies come after it."""
STEPS = frozenset({STEP, STEP_FOR_ALL})
"""The kinds of requests that are steps."""
VALUE, STEP_RESULT, CALL_ERROR, STEP_ERROR = 4, 5, 6, 7
"""Kinds of replies. An error's payload is the pickled pair of its summary and its traceback."""
ERRORS = frozenset({CALL_ERROR, STEP_ERROR})
"""The kinds of replies that report an error."""
NOT_WANTED = b"-"
"""The payload of a reply whose value the caller does not want, or of a worker that has no result of a step."""
_PLAIN = frozenset({bytes, int, str, float, bool, type(None)})

cloudpickle: Any = _cloudpickle  # cloudpickle has no type annotations
encode_plan = msgspec.msgpack.Encoder().encode
decode_plan = msgspec.msgpack.Decoder(StepPlan).decode
encode_grammar = msgspec.msgpack.Encoder().encode
decode_grammar = msgspec.msgpack.Decoder(GrammarOutput).decode
encode_result = msgspec.msgpack.Encoder().encode
decode_result = msgspec.msgpack.Decoder(StepResult).decode


def encode_call(
    method: str | Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None, reply_rank: int | None
) -> bytes:
    """Return the payload of a call. Plain values are encoded with pickle, others with cloudpickle, which is slower."""
    call = (method, tuple(args), kwargs, reply_rank)
    if not kwargs and type(method) is str and _PLAIN.issuperset(map(type, args)):
        return pickle.dumps(call, 5)
    return cloudpickle.dumps(call, 5)


def encode_value(value: object) -> bytes:
    """Return the payload of the reply to a call that returned `value`."""
    if type(value) in _PLAIN or (type(value) in (tuple, list) and _PLAIN.issuperset(map(type, cast(Any, value)))):
        return pickle.dumps(value, 5)
    return cloudpickle.dumps(value, 5)
