"""Checks constraints in a process of their own, because the compiler of constraints is native code that strangers feed.

A schema of fifty bytes can crash llguidance, and a slightly longer one can occupy it for minutes. So the process that
submits requests never compiles: it asks `gate_process.py`, which compiles each constraint in a fork of itself, with
limits. If the fork dies, one request is refused. What has passed, the workers then compile in their own processes.
"""

from __future__ import annotations

import hashlib
import sys
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress

import msgspec

from raycore.errors import EngineDeadError, InvalidRequest
from raycore.extras import check_installed
from raycore.same_copy import own_copy
from raycore.structured_outputs import StructuredOutputsParams
from raycore.system import Future, ThreadPoolExecutor, socket, subprocess, threading, time

MAX_AT_ONCE = 8
"""Maximum number of constraints that are compiled at the same time."""
ACCEPTED, REFUSED, DIED = b"A", b"R", b"D"
"""The first byte of a reply. The reason follows, except after `ACCEPTED`."""
_NUM_KEPT = 4096
_GRACE_S = 20.0
"""How long, in seconds, an answer may be late: the process may have to start and read the tokenizer first."""
_END_TIMEOUT_S = 0.5
_NAME = "raycore-constraint-compiler"


class CompileLimits(msgspec.Struct, frozen=True):
    """What one compilation may use."""

    cpu_s: int = 10
    """Seconds of a processor."""
    wall_s: int = 60
    """Seconds in all."""
    memory_bytes: int = 1 << 30
    """Address space beyond what the process has before."""
    stack_bytes: int = 4 << 20
    """Less than the threads have that compile in workers (`STACK_BYTES` in `compiler.py`)."""


class GateOrder(msgspec.Struct, frozen=True):
    """What a process is told when it starts."""

    checker: tuple[str, str]
    """Module and function, which is called with the next three fields and returns the check of one constraint."""
    tokenizer_dir: str
    vocab_size: int
    eos_token_ids: list[int]
    limits: CompileLimits


class _ProcessEnded(Exception):
    """The process ended, with all that it compiled."""


class ConstraintGate:
    """Refuses constraints that can't be compiled. Starts its process at the first constraint. Thread-safe."""

    def __init__(
        self,
        tokenizer_dir: str,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        limits: CompileLimits | None = None,
        checker: tuple[str, str] = ("raycore.parts.constraints.grammar.walks", "checker"),
    ) -> None:
        """See `NativeCompiler`. Tests give another `checker`: a module and a function in it."""
        self._order = GateOrder(checker, tokenizer_dir, vocab_size, list(eos_token_ids), limits or CompileLimits())
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._is_closed = False
        self._permits = threading.BoundedSemaphore(MAX_AT_ONCE)
        self._verdicts: OrderedDict[bytes, Future[str | None]] = OrderedDict()
        """Why a constraint is refused, or None, by the constraint's digest."""

    def prepare(self) -> None:
        """Start the process, which then reads the tokenizer, and don't wait for it.

        Raises:
            MissingPackage: constrained outputs need a package that isn't installed.
        """
        check_installed("prepare_structured_outputs=True needs", "structured")
        threading.Thread(target=self._try_starting, name="raycore-gate", daemon=True).start()

    def knows(self, asked: StructuredOutputsParams) -> bool:
        """Whether `check` returns, or raises, at once."""
        with self._lock:
            verdict = self._verdicts.get(_digest(asked))
        return verdict is not None and verdict.done()

    def check(self, asked: StructuredOutputsParams) -> None:
        """Raise InvalidRequest, with the reason, if `asked` can't be compiled within the limits."""
        digest = _digest(asked)
        with self._lock:
            verdict = self._verdicts.get(digest)
            is_new = verdict is None
            if verdict is None:
                verdict = self._verdicts[digest] = Future()
                if len(self._verdicts) > _NUM_KEPT:
                    self._verdicts.popitem(last=False)
            self._verdicts.move_to_end(digest)
        if is_new:
            self._find(asked, digest, verdict)
        reason = verdict.result()  # whoever began to find it gives up after some minutes: see `_reason`
        if reason is not None:
            raise InvalidRequest(f"{asked}: {reason}")

    def check_all(self, asked: Iterable[StructuredOutputsParams]) -> None:
        """`check` each, several at the same time."""
        distinct = list({_digest(each): each for each in asked}.values())
        if sum(not self.knows(each) for each in distinct) < 2:
            for each in distinct:
                self.check(each)
            return
        with ThreadPoolExecutor(MAX_AT_ONCE, thread_name_prefix="raycore-gate") as threads:
            list(threads.map(self.check, distinct))

    def close(self) -> None:
        """End the process, if there is one. Later checks raise EngineDeadError."""
        with self._lock:
            self._is_closed = True
            process, self._process = self._process, None
        if process is not None:
            process.end()

    def _find(self, asked: StructuredOutputsParams, digest: bytes, verdict: Future[str | None]) -> None:
        try:
            reason, is_certain = self._reason(msgspec.msgpack.encode(asked))
        except BaseException as error:
            self._forget(digest)
            verdict.set_exception(error)
            raise
        if not is_certain:
            self._forget(digest)
        verdict.set_result(reason)

    def _forget(self, digest: bytes) -> None:
        with self._lock:
            self._verdicts.pop(digest, None)

    def _reason(self, asked: bytes) -> tuple[str | None, bool]:
        """Why a constraint is refused, or None; and whether another attempt would have the same result."""
        wall_s = self._order.limits.wall_s
        if not self._permits.acquire(timeout=wall_s):
            return f"{MAX_AT_ONCE} other constraints have been compiled for {wall_s} s: try again", False
        try:
            for _ in range(2):
                process = None
                try:
                    process = self._running()
                    reply = process.ask(asked, wall_s + _GRACE_S)
                except (_ProcessEnded, OSError):
                    if process is not None:
                        self._drop(process)
                else:
                    return (None if reply[:1] == ACCEPTED else reply[1:].decode()), reply[:1] != DIED
            return "the constraint's compiler failed twice: simplify the constraint, or try again", False
        finally:
            self._permits.release()

    def _try_starting(self) -> None:
        with suppress(OSError, EngineDeadError):  # the first constraint tries again
            self._running()

    def _running(self) -> _Process:
        with self._lock:
            if self._is_closed:
                raise EngineDeadError("the engine is shut down: no more constraints are compiled")
            if self._process is None:
                self._process = _Process(self._order)
            return self._process

    def _drop(self, process: _Process) -> None:
        """Have another process started in place of this one, which doesn't answer."""
        with self._lock:
            if self._process is process:
                self._process = None
        process.end()


class _Process:
    """The process that compiles."""

    def __init__(self, order: GateOrder) -> None:
        own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        # this process's path, and in front of it the folder of its copy of raycore, which it need not have found there
        path = [own_copy()[0], *sys.path]
        start = f"import sys; sys.path[:] = {path!r}; from {__package__}.gate_process import main; main()"
        arguments = [sys.executable, "-c", start, _NAME, str(its.fileno()), msgspec.json.encode(order).decode()]
        with its:
            self._process = subprocess.Popen(arguments, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL)
        self._control = own
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, asked: bytes, timeout_s: float) -> bytes:
        """The reply about a constraint. Raises _ProcessEnded or OSError if there is none."""
        own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with own:
            with its, self._lock:
                socket.send_fds(self._control, [b"j"], [its.fileno()])
            deadline_s = time.monotonic() + timeout_s
            own.settimeout(timeout_s)
            try:
                own.sendall(asked)
                own.shutdown(socket.SHUT_WR)
                reply = b""
                while part := own.recv(1 << 16):
                    reply += part
                    own.settimeout(max(0.001, deadline_s - time.monotonic()))
            except TimeoutError:
                raise _ProcessEnded from None
        if not reply:
            raise _ProcessEnded
        return reply

    def end(self) -> None:
        """End the process and all that it compiles. Doesn't wait until it has read the tokenizer."""
        self._control.close()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _digest(asked: StructuredOutputsParams) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(asked)).digest()
