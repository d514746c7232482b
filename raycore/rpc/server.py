"""The worker's side of calls from its engine: runs calls and steps, and encodes the replies."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from typing import Any

from raycore.rpc.wire import (
    CALL,
    CALL_ERROR,
    HEADER,
    HEADER_BYTES,
    NOT_WANTED,
    STEP,
    STEP_ERROR,
    STEP_RESULT,
    VALUE,
    decode_plan,
    encode_result,
    encode_value,
)


class RpcServer:
    """Turns requests into calls of `worker`'s methods, and the methods' results or exceptions into replies."""

    def __init__(self, worker: Any, rank: int) -> None:
        self.stopped = False
        self._worker = worker
        self._rank = rank
        self._methods: dict[str, Callable[..., Any]] = {}

    def handle(self, message: bytes) -> bytes | None:
        """Run an encoded request. Returns the encoded reply, or None if the request gets no reply."""
        kind, number = HEADER.unpack_from(message)
        payload = memoryview(message)[HEADER_BYTES:]
        try:
            if kind == STEP:
                result = self._worker.execute_model(decode_plan(payload))
                return None if result is None else HEADER.pack(STEP_RESULT, number) + encode_result(result)
            if kind == CALL:
                return HEADER.pack(VALUE, number) + self._call(payload)
            self.stopped = True
            self._worker.shutdown()
            return None
        except Exception as error:  # a worker may raise anything, and the engine must learn of it
            text = (f"{type(error).__name__}: {error}", traceback.format_exc())
            return HEADER.pack(STEP_ERROR if kind == STEP else CALL_ERROR, number) + pickle.dumps(text, 5)

    def _call(self, payload: memoryview) -> bytes:
        method, args, kwargs, reply_rank = pickle.loads(payload)
        if callable(method):
            value = method(self._worker, *args, **(kwargs or {}))
        else:
            bound = self._methods.get(method)
            if bound is None:
                bound = self._methods[method] = getattr(self._worker, method)
            value = bound(*args, **kwargs) if kwargs else bound(*args)
        if reply_rank is not None and reply_rank != self._rank:
            return NOT_WANTED
        return encode_value(value)
