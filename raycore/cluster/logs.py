"""The last lines that a process wrote before it died.

Ray keeps what each of its processes writes to standard error and output in a file of its own. Those of this node are
read directly, others through Ray's state API, which needs the cluster's dashboard. What can't be had is left out: this
is about a failure, and must not become another one.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from contextlib import suppress
from pathlib import Path

from raycore import ray_api

logger = logging.getLogger(__name__)

_NUM_LINES = 20
_MAX_LINE_CHARS = 300
_TAIL_BYTES = 1 << 16

_TIMEOUT_S = 1.0
"""Another node's answer is waited for this long. It takes 20 to 150 ms; a node that is gone, longer."""

_SUFFIXES = ("err", "out")
"""Of Ray's files, in the order in which they are tried."""

_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_RAYS_OWN = re.compile(r":(job_id|actor_name|task_name):")
"""How lines begin by which Ray marks who writes the next ones."""


def with_last_lines(cause: str, pid: int | None, node_id: str | None) -> str:
    """`cause`, followed by the last lines of the process that died, as far as it is known and left any.

    Takes about a millisecond for a process of this node, else at most a second.
    """
    lines = last_lines(pid, node_id) if pid is not None and node_id is not None else []
    if not lines:
        return cause
    return "\n    ".join([f"{cause}\nThe last lines of process {pid}:", *lines])


def last_lines(pid: int, node_id: str) -> list[str]:
    """The last lines that a Ray process wrote to standard error, or to standard output if it left the former empty."""
    if not ray_api.is_connected():
        return []
    if node_id == ray_api.node_id():
        return read_log(ray_api.logs_dir(), pid)
    return _ask_ray(ray_api.cluster_address(), pid, node_id)


def read_log(logs_dir: Path, pid: int) -> list[str]:
    """The last lines of a process, from the folder of Ray's log files on its node."""
    for suffix in _SUFFIXES:
        with suppress(OSError):
            # the newest: a number may have belonged to another process before
            files = sorted(logs_dir.glob(f"worker-*-{pid}.{suffix}"), key=lambda path: path.stat().st_mtime)
            lines = clean(_tail(files[-1])) if files else []
            if lines:
                return lines
    return []


def clean(text: str) -> list[str]:
    """The last lines of `text` that say something, without colours, overwritten progress and Ray's own marks."""
    shown = (_ESCAPE.sub("", line).rstrip().rpartition("\r")[2] for line in text.split("\n"))
    lines = [line for line in shown if line and not _RAYS_OWN.match(line)]
    return [f"{line[:_MAX_LINE_CHARS]}…" if len(line) > _MAX_LINE_CHARS else line for line in lines[-_NUM_LINES:]]


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        return file.read(_TAIL_BYTES).decode(errors="replace")


def _ask_ray(address: str, pid: int, node_id: str) -> list[str]:
    found: list[str] = []

    def ask() -> None:
        try:
            from ray.util.state import get_log  # for which Ray may lack the packages

            for suffix in _SUFFIXES:
                chunks = get_log(
                    address=address,
                    node_id=node_id,
                    pid=pid,
                    suffix=suffix,
                    tail=_NUM_LINES,
                    timeout=int(_TIMEOUT_S),
                    errors="replace",
                )
                found.extend(clean("".join(chunks)))
                if found:
                    return
        except Exception as error:  # whatever Ray's API, the web client under it and a dying cluster may raise
            logger.debug("no last lines of process %d on node %s: %s", pid, node_id, error)

    # in a thread of its own: Ray asks its own store again and again for a dashboard that it has never had
    thread = threading.Thread(target=ask, name="raycore-last-lines", daemon=True)
    thread.start()
    thread.join(_TIMEOUT_S)
    return found if not thread.is_alive() else []
