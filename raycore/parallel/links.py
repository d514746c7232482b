"""Links: tensors on their way from a stage of a pipeline to another one.

A link has two ends, in two workers: one sends, the other receives. The sender may be a few tensors ahead of the
receiver. `SharedMemoryLink` is for CPU workers on one node. It copies tensors into buffers, and the receiver copies
them out. It has no thread. `TorchLink` is for everything else. `make_link()` chooses between the two.
"""

# parts of torch are partially typed:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import datetime
import mmap
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from raycore.parallel.peer_memory import HEADER_BYTES, LINE, share_memory, wait_until
from raycore.parallel.room import Room

_SENDER, _RECEIVER = 0, 1
DEFAULT_AHEAD = 2
"""How many tensors a sender may be ahead of its receiver, unless a link says otherwise."""
_PAGE_BYTES = 4096
_CLOSE_S = 2.0
"""How long, in seconds, an end that closes waits for the receiver. A stuck receiver must not hold up a shutdown."""

_Action = Literal["take", "send"]
_MISSED: dict[_Action, str] = {"take": "take what this one sent", "send": "send what this one waits for"}
"""What the other worker didn't do."""


class Link(Protocol):
    """One end of a link."""

    waited_s: float
    """How long, in seconds, this end has waited for the other one. A GPU's waiting is not included."""

    def send(self, tensor: Tensor) -> None:
        """Send a contiguous tensor. Returns before the receiver has it. The tensor must not be changed afterwards.

        Raises:
            OSError: the receiver is too many steps behind for too long, or gone.
        """
        ...

    def receive_into(self, tensor: Tensor) -> Tensor:
        """Wait for the next tensor, and store it in `tensor`, which has its shape and dtype. Returns `tensor`.

        Raises:
            OSError: it doesn't come in time, or the sender is gone.
        """
        ...

    def finish(self) -> None:
        """Wait until the receiver has everything that this end has sent.

        Raises:
            OSError: that takes too long, or the receiver is gone.
        """
        ...

    def close(self) -> None:
        """Disconnect from the other end, which still receives what was sent. Idempotent."""
        ...


def make_link(
    room: Room,
    *,
    sends: bool,
    device: torch.device,
    capacity_bytes: int,
    timeout_s: float,
    num_ahead: int = DEFAULT_AHEAD,
) -> SharedMemoryLink | TorchLink:
    """Connect one end of a link to the other end, which shares `room`.

    Args:
        sends: whether this end sends.
        capacity_bytes: the size of a large step's tensor. Larger ones are sent in pieces, so that the sender waits for
            the receiver.
        timeout_s: how long either end waits for the other, in seconds.
        num_ahead: how many tensors the sender may be ahead of the receiver.

    Raises:
        PeerFailed: another worker has failed, or is gone.
        TimeoutError: the other end didn't connect in time.
        torch.distributed.DistError: so, in torch.
    """
    rank = _SENDER if sends else _RECEIVER
    if device.type == "cpu":
        capacity_bytes = -(-capacity_bytes // _PAGE_BYTES) * _PAGE_BYTES
        memory = share_memory(room, rank, 2, HEADER_BYTES + num_ahead * capacity_bytes)
        if memory is not None:
            return SharedMemoryLink(memory, timeout_s, num_ahead, room.check)
    return TorchLink(room.torch_store(rank, 2), rank, device, timeout_s, num_ahead, room.check)


class SharedMemoryLink:
    """A link over shared memory, which has a page of counters, and buffers.

    There are two counters: how many pieces have been written, and how many of these have been taken. A piece is a
    tensor, or a part of it if it is larger than a buffer.
    """

    def __init__(self, memory: mmap.mmap, timeout_s: float, num_buffers: int, check: Callable[[], object]) -> None:
        """`check`: raises if another worker is gone, so that this end doesn't wait for the other one."""
        self.waited_s = 0.0
        self._timeout_s = timeout_s
        self._check = check
        self._counters = np.frombuffer(memory, np.int64, count=2 * LINE)[::LINE]
        self._buffers = torch.frombuffer(memory, dtype=torch.uint8, offset=HEADER_BYTES).view(num_buffers, -1)

    def send(self, tensor: Tensor) -> None:
        for piece in self._pieces(tensor):
            self._wait(self._has_room, "take")
            self._buffer(_SENDER, piece).copy_(piece)
            self._counters[_SENDER] += 1

    def receive_into(self, tensor: Tensor) -> Tensor:
        for piece in self._pieces(tensor):
            self._wait(self._has_piece, "send")
            piece.copy_(self._buffer(_RECEIVER, piece))
            self._counters[_RECEIVER] += 1
        return tensor

    def finish(self) -> None:
        self._wait(lambda: self._counters[_SENDER] == self._counters[_RECEIVER], "take")

    def close(self) -> None:
        """Do nothing: there is no connection to close, and the other end keeps the memory."""

    def _pieces(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return tensor.view(-1).split(self._buffers.shape[1] // tensor.element_size())

    def _buffer(self, end: int, piece: Tensor) -> Tensor:
        """Return the buffer of the next piece of this end."""
        return self._buffers[self._counters[end] % len(self._buffers)].view(piece.dtype)[: len(piece)]

    def _has_room(self) -> bool:
        return self._counters[_SENDER] - self._counters[_RECEIVER] < len(self._buffers)

    def _has_piece(self) -> bool:
        return self._counters[_SENDER] > self._counters[_RECEIVER]

    def _wait(self, is_ready: Callable[[], bool], what: _Action) -> None:
        if is_ready():
            return
        started_s = time.monotonic()
        if not wait_until(is_ready, self._timeout_s, self._check):
            raise TimeoutError(
                f"the other stage's worker didn't {_MISSED[what]} within {self._timeout_s:g} s: it is stuck or gone"
            )
        self.waited_s += time.monotonic() - started_s


class TorchLink:
    """A link by torch.distributed: NCCL on GPUs, Gloo elsewhere.

    On GPUs, nothing makes the host wait: the GPU sends on a stream of its own, and computes the next step meanwhile. A
    GPU that doesn't get its tensors in time ends the process.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        device: torch.device,
        timeout_s: float,
        num_ahead: int,
        check: Callable[[], object],
    ) -> None:
        """
        Args:
            rank: 0 on the end that sends, 1 on the end that receives.
            check: raises if another worker is gone. It knows more of that than torch.
        """
        self.waited_s = 0.0
        self._check = check
        self._num_ahead = num_ahead
        self._peer = 1 - rank
        self._sending: deque[tuple[Any, Tensor]] = deque()
        """What is being sent, oldest first, with the tensors, which must live until they are sent."""
        self._is_gpu = device.type == "cuda"
        timeout = datetime.timedelta(seconds=timeout_s)
        if self._is_gpu:
            options = torch.distributed.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group: Any = torch.distributed.ProcessGroupNCCL(store, rank, 2, options)
        else:
            self._group = torch.distributed.ProcessGroupGloo(store, rank, 2, timeout)

    def send(self, tensor: Tensor) -> None:
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()
        if not self._is_gpu and len(self._sending) >= self._num_ahead:
            self._wait(self._sending.popleft()[0].wait, "take")
        self._wait(lambda: self._sending.append((self._group.send([tensor], self._peer, 0), tensor)), "take")

    def receive_into(self, tensor: Tensor) -> Tensor:
        # on a GPU, this makes the stream wait, not the host
        self._wait(lambda: self._group.recv([tensor], self._peer, 0).wait(), "send")
        return tensor

    def finish(self) -> None:
        while self._sending:
            self._wait(self._sending.popleft()[0].wait, "take")
        if self._is_gpu:
            torch.cuda.synchronize()

    def close(self) -> None:
        """Waits up to `_CLOSE_S` until the other end has taken what was sent."""
        self._finish_sending()
        if self._group is not None:
            self._group.shutdown()
        self._group = None
        self._sending.clear()

    def _finish_sending(self) -> None:
        # the sender holds what the receiver hasn't taken, so an end that closed at once would take it along
        deadline_s = time.monotonic() + _CLOSE_S
        for work, _ in self._sending:
            left_s = max(1e-3, deadline_s - time.monotonic())  # to torch, 0 ms means its own, longer limit
            if self._is_gpu:
                wait_until(work.is_completed, left_s, lambda: None)  # its wait() makes only the stream wait
                continue
            with suppress(RuntimeError):  # the receiver is gone or stuck
                work.wait(datetime.timedelta(seconds=left_s))

    def _wait(self, wait: Callable[[], object], what: _Action) -> None:
        started_s = time.monotonic()
        try:
            wait()
        except RuntimeError as error:
            self._check()
            raise ConnectionError(f"the other stage's worker didn't {_MISSED[what]}: {error}") from error
        self.waited_s += time.monotonic() - started_s
