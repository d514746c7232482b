"""The program of the process that compiles constraints for `ConstraintGate`. Imports neither torch nor Ray.

It reads the tokenizer once, and forks for each constraint. Only the forks compile. They have limits of processor time,
memory and stack, so that whatever they are fed ends them and nothing else. The process ends with its owner, and its
forks end with it.
"""

from __future__ import annotations

import importlib
import os
import resource
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec

from raycore.errors import InvalidRequest
from raycore.node.processes import end_with_parent
from raycore.parts.constraints.grammar.gate import ACCEPTED, DIED, REFUSED, CompileLimits, GateOrder
from raycore.structured_outputs import StructuredOutputsParams

_POLL_INTERVAL_S = 1.0
_YIELDS_AFTER_S = 1.0
"""After this time of a processor, a compilation yields the cores to everything else."""
_NICENESS = 10
_MAX_REASON = 4000
_NUM_KEPT_BYTES = 4000
"""How much of a fork's last words is kept."""
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
"""Signals that would end the same compilation again."""
_SHORT_OF_MEMORY = b"memory allocation of "
"""What Rust writes before it aborts for lack of memory."""

Check = Callable[[StructuredOutputsParams], object]
"""Raises InvalidRequest if a constraint can't be compiled."""


class _Job(NamedTuple):
    """A fork, and who waits for it."""

    pid: int
    reply: socket.socket
    last_words: bytearray


def main() -> NoReturn:
    """Serve until the owner ends. `sys.argv`: a name for lists of processes, the socket's number, the order."""
    control = socket.socket(fileno=int(sys.argv[2]))
    order = msgspec.json.decode(sys.argv[3], type=GateOrder)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner
    module, function = order.checker
    check: Check = getattr(importlib.import_module(module), function)(
        order.tokenizer_dir, order.vocab_size, order.eos_token_ids
    )
    _Server(control, check, order.limits).serve()
    os._exit(0)


class _Server:
    """Forks for each constraint, and reports how the forks end."""

    def __init__(self, control: socket.socket, check: Check, limits: CompileLimits) -> None:
        self._control = control
        self._check = check
        self._limits = limits
        self._jobs: dict[int, _Job] = {}
        """What is being compiled, by the descriptor at which the fork's last words arrive."""

    def serve(self) -> None:
        """Serve until the owner has ended or closed its socket."""
        owner = os.getppid()
        control = self._control.fileno()
        while os.getppid() == owner:
            readable, _, _ = select.select([control, *self._jobs], [], [], _POLL_INTERVAL_S)
            for each in readable:
                if each != control:
                    self._read(each)
                elif not self._accept():
                    owner = 0
            self._let_slow_ones_yield()
        for job in self._jobs.values():
            os.kill(job.pid, signal.SIGKILL)

    def _accept(self) -> bool:
        """Fork for the next constraint. Returns False if the owner has closed its socket."""
        _, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
        if not descriptors:
            return False
        reply = socket.socket(fileno=descriptors[0])
        reading, writing = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if not pid:
            # otherwise others would wait for the end of this fork, too
            self._control.close()
            for job in self._jobs.values():
                job.reply.close()
            os.dup2(writing, sys.stderr.fileno())
            os.close(writing)
            _confine(parent, self._limits)
            _compile(reply, self._check, self._limits)
        os.close(writing)
        self._jobs[reading] = _Job(pid, reply, bytearray())
        return True

    def _read(self, descriptor: int) -> None:
        """Read what a fork writes. At the end of it, the fork has ended: reply for it if it couldn't."""
        job = self._jobs[descriptor]
        part = os.read(descriptor, _NUM_KEPT_BYTES)
        if part:
            job.last_words.extend(part)
            del job.last_words[:-_NUM_KEPT_BYTES]
            return
        del self._jobs[descriptor]
        os.close(descriptor)
        status = os.waitstatus_to_exitcode(os.waitpid(job.pid, 0)[1])
        with job.reply, suppress(OSError):  # the owner may no longer listen
            if status:
                job.reply.sendall(self._reply_for(status, bytes(job.last_words)))

    def _reply_for(self, status: int, last_words: bytes) -> bytes:
        """The reply for a fork that has ended without one."""
        kind = REFUSED
        if _SHORT_OF_MEMORY in last_words:
            reason = _too_large(self._limits)
        elif status == -signal.SIGXCPU:
            reason = f"compiling the constraint takes more than {self._limits.cpu_s} s of a processor: simplify it"
        elif status == -signal.SIGALRM:
            kind = DIED
            reason = f"compiling the constraint took longer than {self._limits.wall_s} s: simplify it, or try again"
        else:
            kind, advice = (REFUSED, "") if -status in _CRASHES else (DIED, ", or try again")
            name = signal.Signals(-status).name if status < 0 else f"exit code {status}"
            reason = f"the constraint's compiler ended by {name}: simplify the constraint{advice}"
        return kind + reason.encode()

    def _let_slow_ones_yield(self) -> None:
        for job in self._jobs.values():
            with suppress(OSError):
                if _used_s(job.pid) > _YIELDS_AFTER_S:
                    os.setpriority(os.PRIO_PROCESS, job.pid, _NICENESS)


def _used_s(pid: int) -> float:
    """Seconds of a processor that a process has used. 0 where the system doesn't tell."""
    stat = Path(f"/proc/{pid}/stat")
    if not stat.exists():
        return 0.0
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _confine(parent: int, limits: CompileLimits) -> None:
    """Give this process, a fork, its limits, and let it end with its parent."""
    end_with_parent()
    if sys.platform == "linux":
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
        memory = num_pages * resource.getpagesize() + limits.memory_bytes + limits.stack_bytes
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    if os.getppid() != parent:
        os._exit(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, limits.cpu_s + 1))
    signal.setitimer(signal.ITIMER_REAL, limits.wall_s)
    os.set_blocking(sys.stderr.fileno(), False)  # words that nobody reads are dropped


def _compile(reply: socket.socket, check: Check, limits: CompileLimits) -> NoReturn:
    """Check one constraint on a thread with a small stack, reply, and end this process."""

    def run() -> None:
        text = b"".join(iter(lambda: reply.recv(1 << 16), b""))
        try:
            check(msgspec.msgpack.decode(text, type=StructuredOutputsParams))
        except InvalidRequest as error:
            answer = REFUSED + str(error)[:_MAX_REASON].encode(errors="replace")
        except MemoryError:
            answer = REFUSED + _too_large(limits).encode()
        except BaseException as error:  # the process's outermost frame
            what = f"the constraint's compiler raised {type(error).__name__}: {error}"
            answer = REFUSED + what[:_MAX_REASON].encode(errors="replace")
        else:
            answer = ACCEPTED
        try:
            reply.sendall(answer)
        finally:  # the owner may no longer listen
            os._exit(0)

    threading.stack_size(limits.stack_bytes)
    threading.Thread(target=run).start()
    while True:
        signal.pause()


def _too_large(limits: CompileLimits) -> str:
    return f"compiling the constraint takes more than {limits.memory_bytes >> 20} MiB of memory: simplify it"
