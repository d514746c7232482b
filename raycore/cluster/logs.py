"""Reads the last lines that a process logged before it died.

Ray keeps the standard error and output of each of its processes in files. Files on this node are read directly, files
on other nodes through Ray's state API, which needs the cluster's dashboard. Files that can't be read are left out, so
that reporting a failure never fails.
"""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from pathlib import Path

from raycore import ray_api
from raycore.node.disk import free_bytes, room_of
from raycore.system import os, threading

logger = logging.getLogger(__name__)

_NUM_LINES = 20
_MAX_LINE_CHARS = 300
_TAIL_BYTES = 1 << 16

_TIMEOUT_S = 1.0
"""How long to wait for another node's answer. It usually takes 20 to 150 ms, longer if the node is gone."""

_FULL_BYTES = 64 << 10
"""A disk with less than this is full: a process of Ray's can't write its first log lines."""

_SUFFIXES = ("err", "out")
"""Suffixes of Ray's log files, in the order in which they are tried."""

_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_RAYS_OWN = re.compile(r":(job_id|actor_name|task_name):")
"""Matches Ray's marker lines, which name the job, actor or task that wrote the following lines."""


def with_last_lines(cause: str, pid: int | None, node_id: str | None) -> str:
    """`cause`, followed by the last log lines of the dead process, if that process is known and its log can be read.

    If the disk of Ray's logs is full on the process's node, and that node is this one, this comes before the cause.
    Takes about a millisecond for a process on this node, otherwise at most a second.
    """
    cause = f"{_full_disk(node_id)}{cause}"
    lines = last_lines(pid, node_id) if pid is not None and node_id is not None else []
    if not lines:
        return cause
    return "\n    ".join([f"{cause}\nThe last lines of process {pid}:", *lines])


def _full_disk(node_id: str | None) -> str:
    """`/tmp/ray is full: …`, because Ray's processes die there without a word. Empty if it isn't."""
    if not ray_api.is_connected() or node_id != ray_api.node_id():
        return ""
    folder = ray_api.logs_dir().parents[1]
    free = free_bytes(folder)
    return f"{folder} is full{room_of(folder)}. " if free is not None and free < _FULL_BYTES else ""


def last_lines(pid: int, node_id: str) -> list[str]:
    """The last lines that a Ray process wrote to standard error, or to standard output if standard error is empty."""
    if not ray_api.is_connected():
        return []
    if node_id == ray_api.node_id():
        return read_log(ray_api.logs_dir(), pid)
    return _ask_ray(ray_api.cluster_address(), pid, node_id)


def read_log(logs_dir: Path, pid: int) -> list[str]:
    """The last lines of a process on this node, from Ray's log directory."""
    for suffix in _SUFFIXES:
        with suppress(OSError):
            # the newest file: an earlier process may have had the same pid
            files = sorted(logs_dir.glob(f"worker-*-{pid}.{suffix}"), key=lambda path: path.stat().st_mtime)
            lines = clean(_tail(files[-1])) if files else []
            if lines:
                return lines
    return []


def clean(text: str) -> list[str]:
    """The last non-empty lines of `text`, without color codes, overwritten progress bars and Ray's marker lines."""
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
            from ray.util.state import get_log  # may fail: it needs packages that Ray installs only with extras

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
        except Exception as error:  # Ray's API, its web client and a failing cluster raise many types
            logger.debug("can't read the last lines of process %d on node %s: %s", pid, node_id, error)

    # on a thread, to limit the time: if there is no dashboard, Ray keeps asking the GCS for its address
    thread = threading.Thread(target=ask, name="raycore-last-lines", daemon=True)
    thread.start()
    thread.join(_TIMEOUT_S)
    return found if not thread.is_alive() else []
