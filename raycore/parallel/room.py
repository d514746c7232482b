"""Where the workers of one group tell each other what they need to form it."""

from __future__ import annotations

import datetime

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from raycore.node.listeners import listen
from raycore.parallel.meeting import Meeting
from raycore.parallel.torch_store import connect


class Room:
    """A group's part of a meeting."""

    def __init__(self, meeting: Meeting, name: str, timeout_s: float) -> None:
        """`timeout_s`: how long the operations of a torch store wait, in seconds."""
        self._meeting = meeting
        self._name = name
        self._timeout = datetime.timedelta(seconds=timeout_s)

    def set(self, key: str, value: str) -> None:
        """See `Meeting.set`."""
        self._meeting.set(f"{self._name}/{key}", value)

    def get(self, key: str) -> bytes:
        """See `Meeting.get`."""
        return self._meeting.get(f"{self._name}/{key}")

    def check(self) -> None:
        """See `Meeting.check`."""
        self._meeting.check()

    def torch_store(self, rank: int, size: int) -> TCPStore:
        """Connect a store for torch's groups, as rank `rank` of `size`, when all of them are here.

        Rank 0's process holds it. Torch waits in it until its deadline, whatever happens meanwhile, so nobody begins
        to use it alone.

        Raises: what `get` raises, or torch.distributed.DistError.
        """
        if rank == 0:
            listener = listen(self._meeting.host)
            host, port = listener.getsockname()[:2]
            store = TCPStore(
                host, port, size, True, self._timeout, wait_for_workers=False, master_listen_fd=listener.detach()
            )
            self.set("store", f"{host} {port}")
        else:
            host, port = self.get("store").decode().split()
            store = connect(host, int(port), size, self._timeout.total_seconds(), waits=False)
        self.set(f"stored/{rank}", "")
        for other in range(size):
            self.get(f"stored/{other}")
        return store
