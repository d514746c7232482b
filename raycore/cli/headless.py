"""`raycore serve --headless`: the command for the nodes of a deployment on which no server runs.

Ray starts the ranks on all nodes, so such a node only has to belong to the Ray cluster. The command waits for the engine
of the server, and ends when that engine has ended, so that what runs it sees the node's part as one process.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from raycore.errors import ControlError

_POLL_S = 1.0


def follow(model: str, wait_s: float) -> None:
    """Wait until an engine of `model` has started in this node's Ray cluster, and then until it has ended.

    Raises:
        ControlError: no Ray runs here, or no such engine has started within `wait_s` seconds.
    """
    # imported lazily to keep `raycore --help` fast
    from raycore.control.clusters import clusters_to_search, connected
    from raycore.control.remote import RemoteEngine, engine_names

    def named() -> str | None:
        for name in engine_names():
            try:
                status, _ = RemoteEngine(name).status()
            except ControlError:  # it has just ended
                continue
            if _is_same(status.model, model):
                return name
        return None

    with connected(clusters_to_search("auto")[0]):
        deadline_s = time.monotonic() + wait_s
        while (name := named()) is None:
            if time.monotonic() > deadline_s:
                raise ControlError(
                    f"no engine of {model} has started in this node's Ray cluster within {wait_s:g} s: start the server "
                    "on another node, or give more seconds with --init-timeout-s"
                )
            time.sleep(_POLL_S)
        _say(f"engine {name} runs on this cluster, and Ray places its ranks: this node needs no process of its own")
        with _ending_quietly():
            while True:
                status, is_answering = RemoteEngine(name).status()
                if status.failure is not None or not is_answering:
                    break
                time.sleep(_POLL_S)
        _say(f"engine {name} has ended")


@contextmanager
def _ending_quietly() -> Generator[None, None, None]:
    try:
        yield
    except ControlError:  # its control actor is gone
        return


def _is_same(found: str, asked: str) -> bool:
    return found == os.path.abspath(asked) or Path(found).name == asked


def _say(text: str) -> None:
    print(f"raycore: {text}", file=sys.stderr, flush=True)
