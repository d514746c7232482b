"""A transport between an engine and its worker actors over the shared-memory channels of Ray's compiled graphs.

This is the only module that uses Ray's channels. It reads and writes raw bytes with the functions that `Channel.read()`
and `Channel.write()` call. The conversions, checks and time measurements in these two methods cost several times as
much as the transfer itself, and are not needed for bytes in a buffer of fixed capacity. A channel holds one message: a
writer waits until all readers have taken the previous message. Workers of different stages of a pipeline are in
different steps, so the engine has a channel to each stage: the first one doesn't wait until the last one has time.
"""

# Ray's own types are partial:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import mmap
import re
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ray._raylet import RawSerializedObject  # pyright: ignore[reportAttributeAccessIssue]
from ray.exceptions import RayChannelError, RayChannelTimeoutError
from ray.experimental.channel.shared_memory_channel import Channel
from ray.experimental.channel.utils import get_self_actor

from raycore.node.disk import free_bytes, room_of
from raycore.ray_api import node_id
from raycore.rpc.doorbell import CLOSED, FIRST_PAUSE_S, REPLIES, REQUESTS, Bell, Board, BoardAddress, Waiter
from raycore.rpc.endpoint import TransportClosed
from raycore.rpc.transport import Joiner, ServingActor, split
from raycore.system import os, time

if TYPE_CHECKING:
    from ray import ObjectRef

_SHARED_MEMORY = "/dev/shm"
_SEMAPHORE = re.compile(r"sem\.(?:hdr|obj)\d+-\d+")
_MAPPED = re.compile(rf" (\d+) +{_SHARED_MEMORY}/sem\.")
"""Matches a line of /proc/self/maps that maps a semaphore, and captures the inode of the semaphore's file."""

RAW = b"RAW"
"""The metadata with which Ray marks a value as raw bytes."""
MARK_BYTES = 16
"""Bytes for this metadata in a channel's buffer."""
TAKE_TIMEOUT_MS = 1000
"""Timeout in milliseconds for reading a message that has already been written.

Only another reader, which locks the channel for a short time, can delay such a read.
"""

ABANDONED_S = 600.0
"""Seconds after which nobody opens a semaphore by its name any more. A join takes much less."""

_DUE = b""
"""Stands for a message where there is none. Messages are never empty."""


def _check_room(num_channels: int) -> None:
    """Raises OSError if /dev/shm has no room for the semaphores of this many channels. Ray would abort the process."""
    needed = 2 * num_channels * mmap.PAGESIZE
    free = free_bytes(_SHARED_MEMORY) if os.path.isdir(_SHARED_MEMORY) else None
    if free is not None and free < needed:
        raise OSError(
            f"the channels need {needed >> 10} KiB of {_SHARED_MEMORY}{room_of(_SHARED_MEMORY)}. Delete files "
            "there, or give a container more (`docker run --shm-size`; Kubernetes: an emptyDir with `medium: Memory`)"
        )


def _unlink_semaphores() -> None:
    """Remove the names of the channels' semaphores that this process has open.

    A channel has a buffer on the writer's node, and one on each other node with readers. Each buffer has two named
    semaphores, which are files in /dev/shm. Ray does not remove these files when a process is killed. Once the writer
    and all readers are registered, every process that needs a semaphore has opened it, Ray's daemons included, so the
    names are no longer needed.

    Semaphores are matched by inode, not by name, because the process that creates a semaphore maps it under a temporary
    name. That process must remove the name: if all readers of a buffer are on other nodes, no other process on this
    node has the buffer's semaphores open.
    """
    try:
        mapped = _mapped_semaphores("self")
        files = [file for file in os.scandir(_SHARED_MEMORY) if _SEMAPHORE.fullmatch(file.name)]
    except OSError:
        return
    for file in files:
        if file.inode() in mapped:
            with suppress(OSError):
                os.unlink(file.path)
    remove_abandoned_semaphores()


def _mapped_semaphores(process: str) -> set[int]:
    """The inodes of the semaphores that a process, named by its entry in /proc, has open."""
    return {int(inode) for inode in _MAPPED.findall(Path("/proc", process, "maps").read_text())}


def remove_abandoned_semaphores() -> None:
    """Remove the semaphores of processes that were killed while they joined.

    These are this user's semaphores that are older than `ABANDONED_S` and that no process has open. Their age matters
    where containers share /dev/shm and can't see each other's processes: by then, whoever joins has opened them, and
    needs their names no more.
    """
    newest_s = time.time() - ABANDONED_S
    found: dict[int, str] = {}
    for file in os.scandir(_SHARED_MEMORY) if os.path.isdir(_SHARED_MEMORY) else ():
        with suppress(OSError):
            status = file.stat()
            if _SEMAPHORE.fullmatch(file.name) and status.st_uid == os.getuid() and status.st_mtime < newest_s:
                found[status.st_ino] = file.path
    if not found:  # nearly always: all maps take a while to read
        return
    for process in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            for inode in _mapped_semaphores(process):
                found.pop(inode, None)
    for path in found.values():
        with suppress(OSError):
            os.unlink(path)


class RawChannel:
    """A Ray channel that carries raw bytes."""

    def __init__(self, channel: Any, capacity: int) -> None:
        self.channel = channel
        self.capacity = capacity
        self._core: Any = channel._worker.core_worker
        self._readers: int = channel._num_local_readers
        self._writer_ref = channel._writer_ref
        self._reader_refs = [channel._local_reader_ref]

    @staticmethod
    def create(readers: list[tuple[Any, str]], capacity: int) -> RawChannel:
        """Create a channel from this process to `readers`: pairs of an actor and its node id. `capacity`: in bytes."""
        _check_room(1)
        return RawChannel(Channel(get_self_actor(), readers, capacity + MARK_BYTES), capacity)

    def try_write(self, part: bytes) -> bool:
        """Write `part` without waiting. Returns False if a reader has not taken the previous part yet."""
        try:
            self._core.experimental_channel_put_serialized(
                RawSerializedObject(part), self._writer_ref, self._readers, 0
            )
        except RayChannelTimeoutError:
            return False
        except RayChannelError as error:
            raise TransportClosed from error
        return True

    def try_read(self, timeout_ms: int = 0) -> bytes | None:
        """Read the next part. Returns None if none arrives within `timeout_ms` milliseconds."""
        try:
            data, mark, _ = self._core.get_objects(self._reader_refs, timeout_ms)[0]
        except RayChannelTimeoutError:
            return None
        except RayChannelError as error:
            raise TransportClosed from error
        if mark != RAW:
            raise TransportClosed(f"expected raw bytes in the channel, found a Ray error with metadata {mark!r}")
        return b"" if data is None else data.to_pybytes()  # a copy: the writer reuses the buffer once `data` is freed

    def close(self) -> None:
        """Make all further reads and writes fail, in this process and in other processes on this node."""
        self.channel.close()


class ChannelInvitation(NamedTuple):
    """The `Invitation` to a `ChannelTransport`: what a worker needs to open the channels from and to its engine."""

    rank: int
    requests: Any
    """The Ray channel from the engine to the workers of this worker's stage."""
    stage: int
    engine: Any
    """The engine's actor. None if the engine runs in the driver."""
    engine_node: str
    capacity: int
    board: BoardAddress | None
    spin_window_s: float

    def join(self) -> tuple[ChannelEndpoint, tuple[Any, bool]]:
        """Open the channels in the worker's process. Returns the endpoint, and the answer for
        `ChannelTransport.accept()`.

        The answer is the channel for this worker's replies, and whether this worker can use the engine's `Board`.
        """
        board = Board.open(self.board) if self.board is not None else None
        bell = Bell(board, self.rank) if board is not None else None
        if bell is not None and board is not None and not bell.knock(board.num_workers):
            bell.close()
            board = bell = None
        # if the engine has no actor, name this one instead: on the writer's own node, Ray ignores which actor reads
        reader = self.engine if self.engine is not None else get_self_actor()
        replies = RawChannel.create([(reader, self.engine_node)], self.capacity)
        self.requests.ensure_registered_as_reader()
        requests = RawChannel(self.requests, self.capacity)
        endpoint = ChannelEndpoint(self.rank, self.stage, requests, replies, board, bell, self.spin_window_s)
        return endpoint, (replies.channel, board is not None)


class ChannelEndpoint:
    """A worker's end of a `ChannelTransport`."""

    def __init__(
        self,
        rank: int,
        stage: int,
        requests: RawChannel,
        replies: RawChannel,
        board: Board | None,
        bell: Bell | None,
        spin_window_s: float,
    ) -> None:
        self._requests = requests
        self._replies = replies
        self._board = board
        self._bell = bell
        self._counter = REPLIES + rank
        self._requests_counter = REQUESTS + stage
        self._seen = 0
        self._joiner = Joiner(replies.capacity)
        self._closed = False
        self._waiter = Waiter(spin_window_s, bell, must_poll=board is None)
        self._writes = Waiter(0.0, None, must_poll=True)
        # a device rings no bell when it has finished a step, and its next one may wait for the engine
        self._while_due = Waiter(spin_window_s, None, must_poll=True, longest_pause_s=FIRST_PAUSE_S)

    def finish_joining(self) -> None:
        _unlink_semaphores()

    def receive(self, is_due: Callable[[], bool] | None = None) -> bytes | None:
        if is_due is None:
            return self._waiter.wait(self._look, float("inf"))
        return self._while_due.wait(lambda: self._look() or (_DUE if is_due() else None), float("inf")) or None

    def send(self, message: bytes) -> None:
        for part in split(message, self._replies.capacity):
            if not self._try_write(part):
                self._writes.wait(lambda part=part: self._try_write(part) or None, float("inf"))
            if self._bell is not None and self._board is not None:
                self._board.raise_counter(self._counter)
                self._bell.ring(self._board.num_workers)

    def close(self) -> None:
        self._closed = True
        self._requests.close()
        self._replies.close()
        if self._bell is not None:
            self._bell.close()

    def _look(self) -> bytes | None:
        if self._closed:
            raise TransportClosed
        if self._board is None:
            part = self._requests.try_read()
        elif self._board.memory[CLOSED]:
            raise TransportClosed
        elif self._board.memory[self._requests_counter] == self._seen:
            return None
        else:
            part = self._requests.try_read(TAKE_TIMEOUT_MS)
            if part is not None:
                self._seen = (self._seen + 1) & 0xFF
        return None if part is None else self._joiner.add(part)

    def _try_write(self, part: bytes) -> bool:
        if self._closed or (self._board is not None and self._board.memory[CLOSED]):
            raise TransportClosed
        return self._replies.try_write(part)


class ChannelTransport:
    """Implements `Transport` with one channel to the workers of each stage, and one channel back from each worker."""

    def __init__(
        self,
        workers: Sequence[ServingActor],
        nodes: Sequence[str],
        capacity: int,
        spin_window_s: float,
        stage_size: int | None = None,
    ) -> None:
        """Create the channels to the workers.

        Args:
            nodes: the Ray node id of each worker.
            capacity: size of a channel's buffer in bytes. Longer messages are split.
            spin_window_s: how long, in seconds, a process that waits for a message spins before it sleeps.
            stage_size: number of workers of each stage, which are neighbors in `workers`. None: there is one stage.

        Raises:
            OSError, RayError, ValueError: a channel cannot be created between these processes.
        """
        self._workers = workers
        self._engine = get_self_actor()
        self._node = node_id()
        if self._engine is None and any(node != self._node for node in nodes):
            raise ValueError("only an actor can read channels from other nodes, and this process is a driver")
        self._capacity = capacity
        self._spin_window_s = spin_window_s
        self._stage_size = stage_size or len(workers)
        _check_room(len(workers) // self._stage_size + len(workers))
        readers = list(zip(workers, nodes, strict=True))
        self._requests = [
            RawChannel.create(readers[first : first + self._stage_size], capacity)
            for first in range(0, len(workers), self._stage_size)
        ]
        self._replies: list[RawChannel] = self._requests[:1] * len(workers)  # replaced in accept()
        self._joiners = [Joiner(capacity) for _ in workers]
        self._inbox: deque[tuple[int, bytes]] = deque()
        self._closed = False
        self._board: Board | None = None
        self._board_fd = -1
        self._bell: Bell | None = None
        created = Board.create(len(workers))
        if created is not None:
            self._board, self._board_fd = created
            self._bell = Bell(self._board, len(workers))
        self._seen = bytearray(len(workers))
        self._on_board: list[int] = []
        self._off_board: list[int] = []

    def invite(self, rank: int) -> ChannelInvitation:
        address = None
        if self._board is not None:
            address = BoardAddress(os.getpid(), self._board_fd, self._board.token, len(self._workers))
        stage = rank // self._stage_size
        requests = self._requests[stage].channel
        return ChannelInvitation(
            rank, requests, stage, self._engine, self._node, self._capacity, address, self._spin_window_s
        )

    def accept(self, rank: int, answer: tuple[Any, bool]) -> None:
        channel, sees_board = answer
        channel.ensure_registered_as_reader()
        self._replies[rank] = RawChannel(channel, self._capacity)
        (self._on_board if sees_board else self._off_board).append(rank)

    def finish_joining(self) -> None:
        if self._board_fd >= 0:
            os.close(self._board_fd)  # every worker that can use the board has opened it
            self._board_fd = -1
        _unlink_semaphores()

    def start(self) -> list[ObjectRef[None]]:
        self._waiter = Waiter(self._spin_window_s, self._bell, must_poll=bool(self._off_board))
        self._writes = Waiter(0.0, None, must_poll=True)
        return [worker.serve.remote() for worker in self._workers]

    def send(self, message: bytes, deadline_s: float) -> None:
        parts = split(message, self._capacity)
        for stage in range(len(self._requests)):
            ranks = range(stage * self._stage_size, (stage + 1) * self._stage_size)
            for part in parts:
                if not self._try_write(stage, part):
                    self._wait_to_write(stage, part, deadline_s)
                if self._board is not None and self._bell is not None:
                    self._board.raise_counter(REQUESTS + stage)
                    for rank in self._on_board:
                        if rank in ranks:
                            self._bell.ring(rank)

    def receive(self, deadline_s: float) -> tuple[int, bytes] | None:
        if self._inbox:
            return self._inbox.popleft()
        return self._waiter.wait(self._look, deadline_s)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._board is not None and self._bell is not None:
            self._board.memory[CLOSED] = 1
            for rank in self._on_board:
                self._bell.knock(rank)
        for channel in {id(channel): channel for channel in (*self._requests, *self._replies)}.values():
            channel.close()
        for rank in self._off_board:
            self._workers[rank].close.remote()
        if self._bell is not None:
            self._bell.close()

    def _try_write(self, stage: int, part: bytes) -> bool:
        if self._closed:
            raise TransportClosed
        return self._requests[stage].try_write(part)

    def _wait_to_write(self, stage: int, part: bytes, deadline_s: float) -> None:
        def look() -> bool | None:
            reply = self._look()
            if reply is not None:
                self._inbox.append(reply)
            return self._try_write(stage, part) or None

        if self._writes.wait(look, deadline_s) is None:
            raise TimeoutError("a worker hasn't taken the previous request")

    def _look(self) -> tuple[int, bytes] | None:
        if self._closed:
            raise TransportClosed
        if self._board is not None:
            counters = self._board.memory[self._board.replies]
            # pyright does not know that bytes compare with a bytearray
            if counters != self._seen:  # pyright: ignore[reportUnnecessaryComparison]
                for rank in self._on_board:
                    if counters[rank] != self._seen[rank]:
                        return self._take(rank)
        for rank in self._off_board:
            part = self._replies[rank].try_read()
            message = None if part is None else self._joiners[rank].add(part)
            if message is not None:
                return rank, message
        return None

    def _take(self, rank: int) -> tuple[int, bytes] | None:
        part = self._replies[rank].try_read(TAKE_TIMEOUT_MS)
        if part is None:
            return None
        self._seen[rank] = (self._seen[rank] + 1) & 0xFF
        message = self._joiners[rank].add(part)
        return None if message is None else (rank, message)
