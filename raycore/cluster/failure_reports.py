"""Describes failures of ranks: turns Ray's exceptions into messages that begin with the root cause. Pure."""

from __future__ import annotations

import re

from ray.exceptions import ActorDiedError, RayActorError, RayError, RayTaskError

from raycore.errors import WorkerDied
from raycore.messages import EngineInfo
from raycore.ray_api import cause_of, has_ended

_BOILERPLATE = re.compile(r"^(The actor (died|experienced)\b|(class_name|actor_id|name|namespace|pid|ip): )")
"""Matches the lines of Ray's message that don't concern the cause."""

_PREAMBLE = re.compile(r"^The actor is dead because (its worker process has died\. )?")
_EXIT = re.compile(r"Worker exit type: (\w+) Worker exit detail: (.*?)(?: Some common causes include: .*)?$")
_PID = re.compile(r"^\tpid: (\d+)$", re.MULTILINE)
_SILENT_EXIT = "End of file"
_OWNER_DIED = re.compile(r"its owner has died\..*?Worker exit detail: (.*)", re.DOTALL)
"""Matches what Ray says of an actor that it ends, or doesn't start, because it takes the actor's owner for dead."""

_DECORATION = re.compile(r"\x1b\[[0-9;]*m|^[ ^~]*[\^~]\n", re.MULTILINE)
"""Matches color codes, and the lines of carets that Ray leaves in tracebacks when it removes its own frames."""


def root_cause(error: BaseException) -> BaseException:
    """The exception raised in the actor if `error` is Ray's wrapper around it; otherwise `error` itself."""
    while isinstance(error, RayTaskError) and (cause := cause_of(error)) is not error:
        error = cause
    return error


def describe_death(error: BaseException) -> str:
    """Describe a failure, without the text that Ray adds. The first line is the cause; a traceback may follow.

    An exception raised by an actor is described by its type, message and traceback. The death of a process is described
    by Ray's exit type and detail.
    """
    cause = root_cause(error)
    if isinstance(error, RayTaskError) and cause is not error:
        return f"{_headline(cause)}\n{_plain(str(error))}"
    if isinstance(error, ActorDiedError) and error.actor_init_failed:
        text = _plain(str(error))
        return f"{text.splitlines()[-1]}\n{text}"
    if isinstance(error, RayActorError):
        return _actor_death(str(error))
    return _headline(cause)


def owner_death(error: BaseException | None) -> str | None:
    """Why Ray takes this process, which owns the ranks, for dead, if `error` of a rank says so; otherwise None."""
    while error is not None:
        found = _OWNER_DIED.search(str(error)) if isinstance(error, ActorDiedError) else None
        if found is not None:
            return found[1].strip().splitlines()[0]
        error = error.__cause__
    return None


def describe_rank(info: EngineInfo | None, dp_rank: int) -> str:
    """Name a rank by its dp_rank and, if known, its pid and node."""
    if info is None:
        return f"dp_rank {dp_rank}"
    return f"dp_rank {dp_rank} (pid {info.pid}, node {info.node_id[:8]})"


def describe_loss(error: BaseException | None, info: EngineInfo | None, dp_rank: int) -> str:
    """Describe why a rank was lost. `error`: the exception of the rank's `run_ref`; None if `run()` returned."""
    rank = describe_rank(info, dp_rank)
    if error is None:
        return f"{rank}: run() returned without a request to stop"
    if isinstance(error, RayTaskError):
        headline, _, details = describe_death(error).partition("\n")
        return f"{headline}\n{rank} can't continue\n{details}".rstrip()
    return f"{rank} died: {describe_death(error)}"


def dead_process(error: BaseException | None, info: EngineInfo | None) -> tuple[int | None, str | None]:
    """The pid and node id of the process whose death caused a rank's `error`; (None, None) if no process died."""
    died = root_cause(error) if error is not None else None
    if isinstance(died, WorkerDied):
        return died.pid, died.node
    if has_ended(error) and info is not None:
        return info.pid, info.node_id
    return None, None


def pid_of_dead_actor(error: RayError) -> int | None:
    """The pid of the dead actor that `error` reports; None if `error` doesn't report one, or without its pid."""
    told = _PID.search(str(error)) if isinstance(error, RayActorError) else None
    return int(told[1]) if told is not None else None


def _headline(error: BaseException) -> str:
    """Type and message of an exception; only the message for raycore's own exceptions."""
    message = str(error).strip()
    if not message:
        return type(error).__name__
    own = type(error).__module__.partition(".")[0] in ("raycore", "placement")
    return message if own else f"{type(error).__name__}: {message}"


def _plain(text: str) -> str:
    return _DECORATION.sub("", text).strip()


def _actor_death(text: str) -> str:
    lines = [line.strip() for line in _plain(text).splitlines()]
    told = " ".join(line for line in lines if line and not _BOILERPLATE.match(line))
    said = _PREAMBLE.sub("", told) or " ".join(lines)
    ended = _EXIT.search(said)
    if ended is None:
        return said
    hint = " It crashed or was killed, for example by the out-of-memory killer." if _SILENT_EXIT in ended[2] else ""
    return f"{ended[1]}: {ended[2]}{hint}"
