"""Python's garbage collector in long-running processes: what it leaves out, and a log of what it does."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from raycore.system import SimpleQueue, gc, threading, time

logger = logging.getLogger(__name__)


def freeze_heap(*_: object) -> None:
    """Exclude all objects that exist now from Python's cyclic garbage collection.

    A full collection visits every container object. Imported libraries and a loaded model have several hundred thousand
    container objects, so a collection would stop a step for tens of milliseconds. Call this when everything is loaded,
    and only in processes that raycore starts. The arguments are ignored; `collective_rpc` passes the worker.

    Nothing is collected first: that would delay every start and every replacement, and find only a few objects.
    """
    gc.freeze()


def log_collections(_: object, num_types: int) -> None:
    """Log each garbage collection of this process from now on. Again in the same process: has no effect.

    Args:
        _: `collective_rpc` passes the worker.
        num_types: how many of the most common types to name, of the objects that a collection looks at. 0: none.
    """
    if not any(isinstance(each, _CollectionLog) for each in gc.callbacks):
        gc.callbacks.append(_CollectionLog(num_types))
        logger.setLevel(logging.INFO)  # who asks for this log sees it, whatever the level of the others


class _CollectionLog:
    """Called by the collector when a collection begins, and when it ends.

    A collection may begin anywhere, also where its thread holds a lock of the log's. So lines are written by another
    thread, and reach it through a queue that may be entered twice.
    """

    def __init__(self, num_types: int) -> None:
        self._num_types = num_types
        self._begun_s = 0.0
        self._types: Counter[type] = Counter()
        self._lines: SimpleQueue[tuple[int, float, int, int, Counter[type]]] = SimpleQueue()
        threading.Thread(target=self._write, name="raycore-gc-log", daemon=True).start()

    def __call__(self, phase: str, info: dict[str, Any]) -> None:
        generation = info["generation"]
        if phase == "start":
            if self._num_types:
                for number in range(generation + 1):  # a collection looks at younger generations, too
                    objects: list[object] = gc.get_objects(number)
                    self._types.update(type(each) for each in objects)
            self._begun_s = time.perf_counter()
            return
        duration_s = time.perf_counter() - self._begun_s
        self._lines.put((generation, duration_s, info["collected"], info["uncollectable"], self._types))
        self._types = Counter()

    def _write(self) -> None:
        while True:
            generation, duration_s, num_collected, num_left, types = self._lines.get()
            text = f"garbage collection: generation {generation}, {duration_s * 1e3:.2f} ms, {num_collected} collected"
            if num_left:
                text += f", {num_left} uncollectable"
            if self._num_types:
                common = (f"{each.__qualname__} {count}" for each, count in types.most_common(self._num_types))
                text += f"; of {types.total()} objects: {', '.join(common)}"
            logger.info("%s", text)
