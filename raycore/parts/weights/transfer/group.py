"""A group of a trainer and workers, apart from all other groups of torch.distributed in their processes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from raycore.errors import RaycoreError
from raycore.node.own_process import OwnProcess, keep_for_ever
from raycore.parallel.torch_store import connect

# torch's process groups are partially typed:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportAttributeAccessIssue=false
from raycore.system import Future, socket, threading

TRAINER = 0
"""The trainer's rank."""
_GRACE_S = 1.0
"""How much later the trainer may know that a broadcast has ended than the others."""


class WeightGroup(OwnProcess):
    """Member `rank` of `size`. The trainer broadcasts."""

    def __init__(
        self,
        address: str,
        port: int | socket.socket,
        rank: int,
        size: int,
        timeout_s: float,
        device: torch.device | None = None,
    ) -> None:
        """Meet the others at `address:port`, where the trainer listens.

        `port`: the trainer may give a socket that listens there already.

        Raises:
            RaycoreError: they haven't all come within `timeout_s`.
        """
        listener, port = (None, port) if isinstance(port, int) else (port, int(port.getsockname()[1]))
        self._timeout = timeout = timedelta(seconds=timeout_s)
        self._is_sending = False
        """Whether a broadcast has begun that won't end before the timeout."""
        is_gpu = device is not None and device.type == "cuda"
        try:
            if rank == TRAINER:
                held = None if listener is None else listener.detach()
                self._store = TCPStore(address, port, size, True, timeout, master_listen_fd=held)
            else:
                self._store = connect(address, port, size, timeout_s, waits=True)
            store = PrefixStore("weights", self._store)
            if is_gpu:
                options = torch.distributed.ProcessGroupNCCL.Options()
                options._timeout = timeout
                self._group: Any = torch.distributed.ProcessGroupNCCL(store, rank, size, options)
            else:
                self._group = torch.distributed.ProcessGroupGloo(store, rank, size, timeout)
        except (RuntimeError, ValueError, TimeoutError) as error:
            raise RaycoreError(
                f"the {size} members of a group for weights haven't met at {address}:{port} within {timeout_s:g} s: "
                f"{error}"
            ) from error

    def _disown(self) -> None:
        for held in (vars(self).get("_group"), vars(self).get("_store")):
            keep_for_ever(held)

    def broadcast(self, tensor: Tensor, call: Future[object] | None = None) -> None:
        """Send the trainer's `tensor` to all others, which overwrite theirs.

        Args:
            call: during which the others take part. There is no use in waiting for them when it has ended.

        Raises:
            RaycoreError: a member is gone, or doesn't take part in time.
            Exception: that of `call`, if it fails before the others have the tensor.
        """
        options = torch.distributed.BroadcastOptions()
        options.rootRank = TRAINER
        try:
            work = self._group.broadcast([tensor], options)
            if call is not None and not self._outlasts(call, work):
                self._is_sending = True
                call.result()
                raise RaycoreError("weights couldn't be broadcast: a member of the group didn't take part")
            work.wait(self._timeout)
        except RuntimeError as error:
            raise RaycoreError(f"weights couldn't be broadcast: {error}") from error

    def _outlasts(self, call: Future[object], work: Any) -> bool:
        """Wait for the end of a call or of a broadcast. Returns False if the call has ended, but not the broadcast."""
        one, sent = threading.Event(), threading.Event()

        def note_sent(_: object) -> None:
            sent.set()
            one.set()

        work.get_future().add_done_callback(note_sent)
        call.add_done_callback(lambda _: one.set())
        one.wait(self._timeout.total_seconds())
        return not call.done() or sent.wait(0 if call.exception() else _GRACE_S)

    def close(self) -> None:
        """Leave the group. What members haven't taken is sent in the background, at most until the timeout."""
        held = [self._group, self._store]
        self._group = self._store = None  # pyright: ignore[reportAttributeAccessIssue]
        if self._is_sending:  # a group that goes waits for its broadcasts, and can't cancel them
            threading.Thread(target=held.clear, daemon=True).start()
