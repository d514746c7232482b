"""`raycore serve --headless`: the command for the nodes of a deployment on which no server runs.

Ray starts the ranks on all nodes, so such a node only has to belong to the Ray cluster. The command waits for the
server's engine, and ends when that engine has ended, so that what runs it sees the node's part as one process.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress

from raycore.errors import ControlError

_POLL_S = 1.0


def follow(model: str, wait_s: float) -> None:
    """Wait until an engine of `model` has started in this node's Ray cluster, and then until it has ended.

    Raises:
        InvalidConfig: there is no such checkpoint on this node.
        ControlError: no Ray runs here, or no such engine has started within `wait_s` seconds.
    """
    # imported lazily to keep `raycore --help` fast
    from raycore.checkpoint.hub_cache import find_directory
    from raycore.control.clusters import clusters_to_search, connected
    from raycore.control.remote import RemoteEngine, engine_names

    directory = os.path.abspath(find_directory(model, "config.json", None, None))

    def named() -> str | None:
        for name in engine_names():
            try:
                status, _ = RemoteEngine(name).status()
            except ControlError:  # it has just ended
                continue
            if status.model == directory:
                return name
        return None

    with connected(clusters_to_search("auto")[0]):
        deadline_s = time.monotonic() + wait_s
        while (name := named()) is None:
            if time.monotonic() > deadline_s:
                raise ControlError(
                    f"no engine of {model} has started in this node's Ray cluster within {wait_s:g} s: start the "
                    "server on another node, or give more seconds with --init-timeout-s"
                )
            time.sleep(_POLL_S)
        _say(f"engine {name} runs on this cluster, and Ray places its ranks: this node needs no process of its own")
        with suppress(ControlError):  # the engine's control actor is gone
            while True:
                if RemoteEngine(name).status()[0].failure is not None:
                    break
                time.sleep(_POLL_S)
        _say(f"engine {name} has ended")


def _say(text: str) -> None:
    print(f"raycore: {text}", file=sys.stderr, flush=True)
