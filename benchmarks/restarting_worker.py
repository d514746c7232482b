"""A worker that can't move experts, so that its ranks are restarted when their number changes."""

from __future__ import annotations

from typing import Any

from raycore.worker.worker import Worker


class RestartingWorker(Worker):
    """raycore's own worker otherwise."""

    def memory_need(self, *_: Any) -> Any:
        """Raise an error, which is the reason for the restart."""
        raise NotImplementedError("this benchmark wants a restart")
