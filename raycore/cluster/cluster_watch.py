"""Watches what concerns all ranks of an engine: whether their owner's node has ended, and which nodes are drained."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextlib import closing

from raycore.cluster.runtime import Runtime
from raycore.errors import EngineDeadError
from raycore.system import threading

logger = logging.getLogger(__name__)

_POLL_INTERVAL_S = 0.5
"""Interval, in seconds, at which the threads check whether to end."""

_DRAIN_POLL_INTERVAL_S = 2.0


class ClusterWatch:
    """Two threads: one waits for the end of this process's Ray node, one asks which nodes are being drained.

    Ray answers only when its control store (GCS) does. That may be away for a minute, during which ranks serve on. So
    nobody else waits for the answer.
    """

    def __init__(self, runtime: Runtime, on_lost: Callable[[EngineDeadError], object]) -> None:
        """`on_lost`: called with the cause when this process's node has ended."""
        self.draining: Collection[str] = frozenset()
        """The ids of the nodes that are being drained, as last known."""
        self._runtime = runtime
        self._on_lost = on_lost
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        start_thread = self._runtime.clock.start_thread
        self._threads = [
            start_thread("raycore-own-node", self._watch_own_node),
            start_thread("raycore-drained-nodes", self._read_drained_nodes),
        ]

    def stop(self) -> None:
        """Tell the threads to end. Idempotent."""
        self._stopping.set()

    def join(self, timeout_s: float) -> None:
        """After `stop()`: wait up to `timeout_s` seconds for the threads to end."""
        deadline_s = self._runtime.clock.now_s() + timeout_s
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline_s - self._runtime.clock.now_s()))

    def _watch_own_node(self) -> None:
        with closing(self._runtime.watch_own_node()) as node:
            has_ended = False
            while not has_ended and not self._stopping.is_set():
                has_ended = node.wait(_POLL_INTERVAL_S)
        if not self._stopping.is_set():
            self._on_lost(
                EngineDeadError(
                    "the Ray node of this process has ended: its daemon, the raylet, is gone. Ray ends all ranks with "
                    "it, and starts none for this process any more. Start the program again on a node that is up"
                )
            )
            self._runtime.end_worker()

    def _read_drained_nodes(self) -> None:
        while not self._stopping.is_set():
            try:
                self.draining = self._runtime.draining_nodes()
            except Exception as error:  # Ray raises many types while its control store is away
                logger.debug("can't ask which nodes are being drained: %s", error)
            self._runtime.clock.wait(self._stopping, _DRAIN_POLL_INTERVAL_S)
