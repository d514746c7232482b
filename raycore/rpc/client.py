"""The engine's side of calls to its workers: sends calls and steps, and matches replies to them.

`RpcClient` has no thread of its own. A thread that waits for a result reads all replies that arrive, and stores each
with the call whose number it carries. The message format is in `rpc/wire.py`, the worker's side in `rpc/server.py`.
"""

from __future__ import annotations

import math
import pickle
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from raycore.errors import RpcTimeout, WorkerFailed
from raycore.messages import GrammarOutput, StepPlan, StepResult
from raycore.rpc.endpoint import TransportClosed
from raycore.rpc.pending import Callback, run_callbacks
from raycore.rpc.transport import Transport
from raycore.rpc.wire import (
    CALL,
    ERRORS,
    HEADER,
    HEADER_BYTES,
    NOT_WANTED,
    SAMPLE,
    STEP,
    STEP_ERROR,
    STEP_FOR_ALL,
    STOP,
    decode_result,
    encode_grammar,
    encode_plan,
)
from raycore.rpc.worker_methods import worker_error
from raycore.system import threading, time

T = TypeVar("T")

_adding_callback = threading.Lock()
"""Held while a call gets its first callback."""


def _decode_values(replies: list[bytes]) -> list[Any]:
    return [pickle.loads(reply) for reply in replies]


def _decode_step(replies: list[bytes]) -> StepResult:
    return decode_result(next(filter(None, replies)))


def _decode_steps(replies: list[bytes]) -> list[StepResult | None]:
    return [None if reply == NOT_WANTED else decode_result(reply) for reply in replies]


class SentCall(Generic[T]):
    """A call or step that was sent to the workers, and its replies so far. Implements `PendingCall`."""

    __slots__ = (
        *("_client", "_decode", "_value", "callbacks", "deadline_s"),
        *("error", "num_missing", "number", "replies", "what"),
    )

    def __init__(
        self, client: RpcClient, number: int, what: str, num_missing: int, decode: Callable[[list[bytes]], T]
    ) -> None:
        self._client = client
        self._decode: Callable[[list[bytes]], T] | None = decode
        self._value: T | None = None
        self.number = number
        self.what = what
        self.deadline_s = math.inf
        self.num_missing = num_missing
        self.replies: list[bytes] = [b""] * client.num_workers
        self.error: BaseException | None = None
        self.callbacks: deque[Callback] | None = None
        """None until there is one, because every step makes such an object."""

    @property
    def is_complete(self) -> bool:
        """Whether the result or the error is known."""
        return not self.num_missing or self.error is not None

    def done(self) -> bool:
        """Whether `result()` would return or raise at once. First reads the replies that have arrived."""
        self._client.pump(self, time.monotonic())
        return self.is_complete

    def add_done_callback(self, callback: Callback) -> None:
        with _adding_callback:
            if self.callbacks is None:
                self.callbacks = deque()
        self.callbacks.append(callback)
        if self.is_complete:
            self.run_callbacks()

    def run_callbacks(self) -> None:
        """Run the callbacks of a complete call that haven't run yet. Not while the client is locked."""
        if self.callbacks is not None:
            run_callbacks(self, self.callbacks)

    def result(self, timeout: float | None = None) -> T:
        """Wait for the call's replies, and return its result.

        Waits at most `timeout` seconds, and not beyond the call's own deadline.

        Raises:
            WorkerFailed, WorkerDied, RpcTimeout: see `Executor.collective_rpc`.
        """
        if self.num_missing and self.error is None:
            deadline_s = self.deadline_s if timeout is None else min(self.deadline_s, time.monotonic() + timeout)
            self._client.pump(self, deadline_s)
            if not self.is_complete:
                self._client.give_up(self)
        if self.error is not None:
            raise self.error
        if self._decode is not None:
            self._value = self._decode(self.replies)
            self._decode = None
        return self._value  # pyright: ignore[reportReturnType]


class RpcClient:
    """Sends calls and steps to an engine's workers, and receives the replies. Thread-safe."""

    def __init__(self, transport: Transport, num_workers: int, failure: Callable[[], BaseException]) -> None:
        """`failure`: called if the transport was closed. Returns the error to raise."""
        self.num_workers = num_workers
        self.late_failure: Callable[[WorkerFailed], None] = lambda error: None
        """Called if a worker fails in a step that is over, for example because another worker has sent the result."""
        self._transport = transport
        self._failure = failure
        self._turn = threading.Lock()
        self._calls: dict[int, SentCall[Any]] = {}
        self._last_number = 0

    def call(
        self,
        method: str | Callable[..., Any],
        payload: bytes,
        reply_rank: int | None,
        aggregate: Callable[[list[Any]], Any] | None,
        timeout_s: float,
    ) -> SentCall[Any]:
        """Start a call on every worker, and return it without waiting. `payload` comes from `encode_call()`.

        The result of the call is what worker `reply_rank` returns. If that is None, the result is the list of what all
        workers return, in rank order, or what `aggregate` makes of that list.
        """
        decode: Callable[[list[bytes]], Any] = _decode_values
        if reply_rank is not None:
            decode = lambda replies: pickle.loads(replies[reply_rank])  # noqa: E731
        elif aggregate is not None:
            decode = lambda replies: aggregate(_decode_values(replies))  # noqa: E731
        what = method if isinstance(method, str) else repr(method)
        return self._send(CALL, what, payload, self.num_workers, decode, timeout_s)

    def step(
        self,
        plan: StepPlan,
        timeout_s: float,
        aggregate: Callable[[list[StepResult | None]], StepResult] | None = None,
    ) -> SentCall[StepResult]:
        """Start a step on every worker, and return the call without waiting for replies.

        With `aggregate`, all workers reply, and the call's result is what `aggregate` makes of their results, in rank
        order.
        """
        if aggregate is None:
            return self._send(STEP, "a step", encode_plan(plan), 1, _decode_step, timeout_s)
        decode: Callable[[list[bytes]], StepResult] = lambda replies: aggregate(_decode_steps(replies))  # noqa: E731
        return self._send(STEP_FOR_ALL, "a step", encode_plan(plan), self.num_workers, decode, timeout_s)

    def sample_tokens(self, step: SentCall[StepResult], grammar: GrammarOutput, timeout_s: float) -> None:
        """Send the masks of the last step that was sent, which is masked. Its replies come after that."""
        self._send(SAMPLE, step.what, encode_grammar(grammar), 0, _decode_step, timeout_s, step.number)

    def stop(self, timeout_s: float) -> None:
        """Ask the workers to stop. They do not reply."""
        self._send(STOP, "stop", b"", 0, _decode_values, timeout_s)

    def pump(self, call: SentCall[Any], deadline_s: float) -> None:
        """Read replies and store them with their calls, until `call` is complete or `deadline_s` has passed.

        `deadline_s` is a time of `time.monotonic()`.
        """
        while call.num_missing and call.error is None and self._take_turn(deadline_s):
            ended = None
            try:
                if call.num_missing and call.error is None:  # another thread may have completed it
                    received = self._receive(call, deadline_s)
                    if received is not None:
                        ended = self._hand_out(*received)
                    elif call.error is None:
                        return
                    else:
                        ended = call
            finally:
                self._turn.release()
            if ended is not None and ended.callbacks and ended.is_complete:
                ended.run_callbacks()

    def give_up(self, call: SentCall[Any]) -> None:
        """Complete a call with an RpcTimeout as its error. Replies that arrive later are discarded."""
        self._calls.pop(call.number, None)
        late = [str(rank) for rank, reply in enumerate(call.replies) if not reply]
        call.error = RpcTimeout(
            f"{call.what} timed out: no reply from workers [{', '.join(late)}], which may be stuck; "
            "or the timeout may be too short"
        )
        call.run_callbacks()

    def _send(
        self,
        kind: int,
        what: str,
        payload: bytes,
        num_replies: int,
        decode: Callable[[list[bytes]], T],
        timeout_s: float,
        number: int | None = None,
    ) -> SentCall[T]:
        """`number`: of the call to which the message belongs. None: it is a new one."""
        deadline_s = time.monotonic() + timeout_s
        if not self._take_turn(deadline_s):
            raise RpcTimeout(f"{what} timed out after {timeout_s:g} s: another thread's call kept the workers busy")
        try:
            if number is None:
                self._last_number = number = self._last_number + 1
            self._transport.send(HEADER.pack(kind, number) + payload, deadline_s)
            call = SentCall(self, number, what, num_replies, decode)  # after sending, so that the workers start sooner
            call.deadline_s = deadline_s
            if num_replies:
                self._calls[number] = call
            return call
        except TransportClosed as closed:
            raise self._failure() from closed
        except TimeoutError as error:
            raise RpcTimeout(f"{what} timed out after {timeout_s:g} s: {error}") from error
        finally:
            self._turn.release()

    def _take_turn(self, deadline_s: float) -> bool:
        if self._turn.acquire(False):
            return True
        return self._turn.acquire(timeout=min(max(0.0, deadline_s - time.monotonic()), threading.TIMEOUT_MAX))

    def _receive(self, call: SentCall[Any], deadline_s: float) -> tuple[int, bytes] | None:
        try:
            return self._transport.receive(deadline_s)
        except TransportClosed as closed:
            call.error = self._failure()
            call.error.__cause__ = call.error.__cause__ or closed
            return None

    def _hand_out(self, rank: int, message: bytes) -> SentCall[Any] | None:
        """Store a reply with its call, and return the call; None if nobody waits for it any more."""
        kind, number = HEADER.unpack_from(message)
        call = self._calls.get(number)
        if kind in ERRORS:
            error = worker_error(rank, *pickle.loads(message[HEADER_BYTES:]))
            if call is not None:
                call.error = error
                del self._calls[number]
            elif kind == STEP_ERROR:
                self.late_failure(error)
        elif call is not None:
            call.replies[rank] = message[HEADER_BYTES:]
            call.num_missing -= 1
            if call.num_missing == 0:
                del self._calls[number]
        return call
