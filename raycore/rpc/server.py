"""The worker's side of calls from its engine: runs calls and steps, and encodes the replies."""

from __future__ import annotations

import pickle
import traceback
from collections import deque
from typing import Any

from raycore.messages import StepResult
from raycore.rpc.pending import Pending
from raycore.rpc.wire import (
    CALL,
    CALL_ERROR,
    HEADER,
    HEADER_BYTES,
    NOT_WANTED,
    SAMPLE,
    STEP,
    STEP_ERROR,
    STEP_FOR_ALL,
    STEP_RESULT,
    STEPS,
    VALUE,
    decode_grammar,
    decode_plan,
    encode_result,
    encode_value,
)
from raycore.rpc.worker_methods import call_method, told_by_worker
from raycore.rpc.worker_steps import StepReturn, WorkerSteps


class RpcServer:
    """Turns requests into calls of `worker`'s methods, and the methods' results or exceptions into replies.

    A step may be *unfinished*: launched, while the device still computes it.
    """

    def __init__(self, worker: Any, rank: int) -> None:
        self.stopped = False
        self._unfinished: deque[tuple[int, int, Pending[StepResult | None]]] = deque()
        """(kind, number, pending result) of each unfinished step, in order."""
        self._worker = worker
        self._steps = WorkerSteps(worker)
        self._masked_kind = STEP
        """The kind of the last masked step."""
        self._rank = rank

    def handle(self, message: bytes) -> bytes | None:
        """Run an encoded request. Returns the encoded reply, or None if the request gets no reply, or not yet."""
        kind, number = HEADER.unpack_from(message)
        payload = memoryview(message)[HEADER_BYTES:]
        try:
            if kind in STEPS:
                plan = decode_plan(payload)
                if plan.masked:
                    self._steps.execute(plan)
                    self._masked_kind = kind
                    return None
                return self._reply(kind, number, self._steps.execute(plan))
            if kind == SAMPLE:
                if not self._steps.is_masked:
                    return None  # it has failed
                return self._reply(self._masked_kind, number, self._steps.sample(decode_grammar(payload)))
            if kind == CALL:
                return HEADER.pack(VALUE, number) + self._call(payload)
            self.stopped = True
            self._worker.shutdown()
            return None
        except Exception as error:  # a worker may raise anything, and the engine must learn of it
            return _error_reply(STEP_ERROR if kind in STEPS or kind == SAMPLE else CALL_ERROR, number, error)

    def _reply(self, kind: int, number: int, result: StepReturn) -> bytes | None:
        """Return the reply to a step. None: it gets none, or not yet."""
        if result is not None and not isinstance(result, StepResult):
            self._unfinished.append((kind, number, result))
            return None
        return _step_reply(kind, number, result)

    @property
    def has_unfinished(self) -> bool:
        """Whether a step is unfinished."""
        return bool(self._unfinished)

    def is_due(self) -> bool:
        """Whether `finish_step` would return at once."""
        try:
            return self._unfinished[0][2].done()
        except Exception:  # the device has failed: finish_step() reports it
            return True

    def finish_step(self) -> bytes | None:
        """Wait for the oldest unfinished step. Returns its encoded reply, or None if it gets none."""
        kind, number, pending = self._unfinished.popleft()
        try:
            return _step_reply(kind, number, pending.result())
        except Exception as error:  # the device's libraries may raise anything, and the engine must learn of it
            return _error_reply(STEP_ERROR, number, error)

    def _call(self, payload: memoryview) -> bytes:
        method, args, kwargs, reply_rank = pickle.loads(payload)
        if callable(method):
            value = method(self._worker, *args, **(kwargs or {}))
        else:
            value = call_method(self._worker, method, args, kwargs or {})
        if reply_rank is not None and reply_rank != self._rank:
            return NOT_WANTED
        return encode_value(value)


def _step_reply(kind: int, number: int, result: StepResult | None) -> bytes | None:
    if result is not None:
        return HEADER.pack(STEP_RESULT, number) + encode_result(result)
    return HEADER.pack(STEP_RESULT, number) + NOT_WANTED if kind == STEP_FOR_ALL else None


def _error_reply(kind: int, number: int, error: Exception) -> bytes:
    """The reply that reports `error`, made while it is handled."""
    return HEADER.pack(kind, number) + pickle.dumps(told_by_worker(error, traceback.format_exc()), 5)
