"""Receives the outputs of all ranks on one thread, each as soon as it has come.

Ray tells when the next item of a stream is there. So nothing waits for one rank alone, an idle rank costs nothing, and
an item costs the same whatever the number of ranks. This module doesn't import Ray.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Generic, Protocol, TypeVar

from raycore.system import Future, queue, threading, time

logger = logging.getLogger(__name__)

CAUSE_GRACE_S = 2.0
"""How long to wait, after a stream has broken, for the supervisor to report the rank lost."""

_POLL_INTERVAL_S = 0.01
"""Interval, in seconds, at which that is checked."""


class Items(Protocol):
    """The items of a stream: see `raycore.ray_api.Stream`."""

    def next_or_tell(self, told: Callable[[Future[bytes]], object]) -> bytes | None:
        """The next item, if it is here. Otherwise None, and `told` is called once it is, or the stream has ended."""
        ...

    def take(self, told: Future[bytes]) -> bytes:
        """The item that `told` was called with. Raises StopIteration at the end of the stream."""
        ...


class OutputSource(Protocol):
    """A rank whose outputs are received."""

    @property
    def dp_rank(self) -> int: ...

    @property
    def has_left(self) -> bool:
        """Whether no more items are wanted."""
        ...


SourceT = TypeVar("SourceT", bound=OutputSource)


class Receiver(Generic[SourceT]):
    """One thread, which runs while there are streams. Thread-safe."""

    def __init__(
        self,
        begin: Callable[[SourceT], Items],
        deliver: Callable[[SourceT, bytes], object],
        is_current: Callable[[SourceT], bool],
        on_broken: Callable[[SourceT, str], object],
        loss: type[Exception],
    ) -> None:
        """
        Args:
            begin: begins the stream of a source. This and the others are called on the thread.
            deliver: gets the items of each source in order.
            is_current: whether the end of a source's stream concerns anybody.
            on_broken: called with a reason if the items of a source can't be delivered, or if its stream breaks and it
                is still current 2 s later.
            loss: what a stream raises that has broken.
        """
        self._begin = begin
        self._deliver = deliver
        self._is_current = is_current
        self._on_broken = on_broken
        self._loss = loss
        self._come: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        """What the thread has to do: begin streams, and take items."""
        self._suspects: deque[tuple[float, SourceT, Exception]] = deque()
        """(deadline, source, error) of broken streams, the oldest first. Only the thread uses them."""
        self._changed = threading.Condition()
        self._num_open = 0
        """Streams that haven't ended, and those that have broken and whose source is still current."""
        self._has_thread = False

    def add(self, source: SourceT) -> None:
        """Begin the stream of a source, and receive its items until it ends."""
        with self._changed:
            self._num_open += 1
            self._come.put(partial(self._start, source))
            if not self._has_thread:
                self._has_thread = True
                threading.Thread(target=self._run, name="raycore-outputs", daemon=True).start()

    def join(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds until all streams have ended. Returns whether they have."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_open, timeout_s)

    # ---- on the thread

    def _run(self) -> None:
        while True:
            try:
                act = self._come.get(timeout=_POLL_INTERVAL_S if self._suspects else None)
            except queue.Empty:
                act = None
            if act is not None:
                act()
            self._look_at_suspects()
            with self._changed:
                if not self._num_open:  # whoever adds the next stream starts another thread
                    self._has_thread = False
                    self._changed.notify_all()
                    return

    def _start(self, source: SourceT) -> None:
        try:
            self._go_on(source, self._begin(source))
        except Exception as error:
            self._break(source, error)

    def _go_on(self, source: SourceT, items: Items) -> None:
        """Have the next item taken when it is here, and after those of other streams that have come before."""
        item = items.next_or_tell(lambda told: self._come.put(partial(self._take, source, items, told)))
        if item is not None:
            self._come.put(partial(self._take, source, items, item))

    def _take(self, source: SourceT, items: Items, item: bytes | Future[bytes]) -> None:
        try:
            self._deliver(source, item if isinstance(item, bytes) else items.take(item))
            if source.has_left:  # another call of its method must not begin
                self._end()
            else:
                self._go_on(source, items)
        except StopIteration:
            self._end()
        except Exception as error:
            self._break(source, error)

    def _end(self) -> None:
        with self._changed:
            self._num_open -= 1

    def _break(self, source: SourceT, error: Exception) -> None:
        """Receive no more of a source, because of an error. Its rank has to be replaced, unless it is lost already."""
        if isinstance(error, self._loss):
            self._suspects.append((time.monotonic() + CAUSE_GRACE_S, source, error))
            return
        if self._is_current(source):
            logger.error("can't process the outputs of dp_rank %d", source.dp_rank, exc_info=error)
            self._on_broken(source, f"its outputs can't be processed: {type(error).__name__}: {error}")
        self._end()

    def _look_at_suspects(self) -> None:
        """Forget the broken streams of ranks that are known to be lost, and report those that have been left over."""
        for _ in range(len(self._suspects)):
            deadline_s, source, error = self._suspects.popleft()
            if not self._is_current(source):
                self._end()
            elif time.monotonic() < deadline_s:
                self._suspects.append((deadline_s, source, error))
            else:
                self._on_broken(source, f"its output stream broke: {error}")
                self._end()
