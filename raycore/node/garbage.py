"""A setting of Python's garbage collector for long-running processes."""

from __future__ import annotations

from raycore.system import gc


def freeze_heap(*_: object) -> None:
    """Exclude all objects that exist now from Python's cyclic garbage collection.

    A full collection visits every container object. Imported libraries and a loaded model have several hundred thousand
    container objects, so a collection would stop a step for tens of milliseconds. Call this when everything is loaded,
    and only in processes that raycore starts. The arguments are ignored; `collective_rpc` passes the worker.

    Nothing is collected first: that would delay every start and every replacement, and find only a few objects.
    """
    gc.freeze()
