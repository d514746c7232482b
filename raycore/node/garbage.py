"""Python's garbage collector in processes that serve for long."""

from __future__ import annotations

import gc


def freeze_heap(*_: object) -> None:
    """Have the collector never again look at what this process holds now.

    A full collection visits every container, of which the imported libraries and a loaded model have several hundred
    thousand: tens of milliseconds in the middle of a step. For processes that are raycore's alone; call it when
    everything is loaded. Takes any arguments, so that `collective_rpc` can call it with a worker.
    """
    gc.collect()
    gc.freeze()
