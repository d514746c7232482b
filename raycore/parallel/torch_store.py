"""Torch's store, with a deadline where torch has none."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]


def connect(host: str, port: int, size: int, timeout_s: float, *, waits: bool) -> TCPStore:
    """Connect to the store at `host:port`.

    Args:
        timeout_s: how long this takes at most, and operations of the store do, in seconds.
        waits: wait for all `size` members.

    Raises:
        TimeoutError: whoever listens there doesn't answer. It may be another program.
        torch.distributed.DistError: nobody listens there, or not all members came in time.
    """
    made: Future[TCPStore] = Future()

    def run() -> None:
        try:
            made.set_result(TCPStore(host, port, size, False, timedelta(seconds=timeout_s), wait_for_workers=waits))
        except RuntimeError as error:
            made.set_exception(error)

    # on a thread of its own, because torch waits for the first answer without a deadline
    threading.Thread(target=run, name="raycore-store", daemon=True).start()
    try:
        return made.result(timeout_s)
    except FutureTimeout as error:
        raise TimeoutError(f"nobody answers at {host}:{port} within {timeout_s:g} s") from error
