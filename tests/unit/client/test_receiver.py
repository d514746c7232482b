"""One thread receives the outputs of all ranks."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import pytest
from waiting import LONG_S, eventually

from raycore.client import receiver as module
from raycore.client.receiver import Receiver


class Lost(Exception):
    """What a broken stream raises."""


@dataclass(eq=False)
class Rank:
    """A rank and its stream."""

    dp_rank: int
    has_left: bool = False
    is_current: bool = True
    told: list[Callable[[Future[bytes]], object]] = field(default_factory=list)
    """Who waits for the next item."""
    here: deque[bytes] = field(default_factory=deque[bytes])
    """Items that come without anybody's being told."""
    num_asked: int = 0

    def next_or_tell(self, told: Callable[[Future[bytes]], object]) -> bytes | None:
        self.num_asked += 1
        if self.here:
            return self.here.popleft()
        self.told.append(told)
        return None

    def take(self, told: Future[bytes]) -> bytes:
        if told.result() == b"end":
            raise StopIteration
        return told.result()

    def give(self, item: bytes | Exception) -> None:
        """Let the next item come, or what breaks the stream."""
        eventually(lambda: bool(self.told))
        come: Future[bytes] = Future()
        come.set_exception(item) if isinstance(item, Exception) else come.set_result(item)
        self.told.pop()(come)


class Received:
    """A receiver, and what has come of its calls."""

    def __init__(self) -> None:
        self.items: dict[int, list[bytes]] = defaultdict(list)
        self.threads: set[threading.Thread] = set()
        self.broken: list[tuple[int, str]] = []
        self.refused: bytes | None = None
        self.receiver = Receiver(
            lambda rank: rank,
            self._deliver,
            lambda rank: rank.is_current,
            lambda rank, reason: self.broken.append((rank.dp_rank, reason)),
            Lost,
        )

    def _deliver(self, rank: Rank, item: bytes) -> None:
        if item == self.refused:
            raise ValueError(f"no room for {item!r}")
        self.threads.add(threading.current_thread())
        self.items[rank.dp_rank].append(item)

    def add(self, count: int) -> list[Rank]:
        ranks = [Rank(dp_rank) for dp_rank in range(count)]
        for rank in ranks:
            self.receiver.add(rank)
        return ranks


@pytest.fixture
def received() -> Received:
    return Received()


def test_one_thread_delivers_the_items_of_many_ranks_in_the_order_of_each(received: Received):
    num_before = threading.active_count()
    ranks = received.add(100)
    for number in range(3):
        for rank in reversed(ranks):
            rank.give(b"%d" % number)
    eventually(lambda: sum(map(len, received.items.values())) == 300)
    assert all(items == [b"0", b"1", b"2"] for items in received.items.values())
    assert len(received.threads) == 1
    assert threading.active_count() == num_before + 1
    assert not received.receiver.join(0.0)
    for rank in ranks:
        rank.give(b"end")
    assert received.receiver.join(LONG_S)
    eventually(lambda: threading.active_count() == num_before)


def test_an_item_costs_nothing_of_other_ranks(received: Received):
    first, *others = received.add(50)
    for _ in range(20):
        first.give(b"x")
    eventually(lambda: len(received.items[0]) == 20 and first.num_asked == 21)
    assert {rank.num_asked for rank in others} == {1}


def test_a_rank_with_many_items_that_are_here_keeps_no_other_from_its_turn(received: Received):
    busy, other = Rank(0, here=deque([b"x"] * 1000)), Rank(1, here=deque([b"y"]))
    order: list[int] = []

    def deliver(rank: Rank, _: bytes) -> None:
        if not order:
            receiver.add(other)
        order.append(rank.dp_rank)

    receiver = Receiver(lambda rank: rank, deliver, lambda rank: True, lambda rank, why: None, Lost)
    receiver.add(busy)
    for rank in (busy, other):
        rank.give(b"end")
    assert receiver.join(LONG_S)
    assert (len(order), order.count(1)) == (1001, 1)
    assert order.index(1) < 10


def test_streams_that_come_after_all_have_ended_get_a_thread_too(received: Received):
    for _ in range(3):
        (rank,) = received.add(1)
        rank.give(b"x")
        rank.give(b"end")
        assert received.receiver.join(LONG_S)
    assert received.items[0] == [b"x"] * 3


def test_nothing_more_is_asked_of_a_rank_that_was_left(received: Received):
    (rank,) = received.add(1)
    rank.has_left = True
    rank.give(b"last")
    assert received.receiver.join(LONG_S)
    assert (rank.num_asked, received.items[0]) == (1, [b"last"])


def test_a_broken_stream_is_reported_unless_its_rank_is_known_to_be_lost_in_time(
    received: Received, monkeypatch: pytest.MonkeyPatch
):
    now_s = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s[0])
    known, unknown, healthy = received.add(3)
    known.give(Lost("known"))
    unknown.give(Lost("unknown"))
    known.is_current = False
    now_s[0] += 1.0
    healthy.give(b"x")
    eventually(lambda: received.items[2] == [b"x"])
    assert received.broken == []
    now_s[0] += 2.0
    eventually(lambda: bool(received.broken))
    assert received.broken == [(1, "its output stream broke: unknown")]
    healthy.give(b"end")
    assert received.receiver.join(LONG_S)


def test_a_rank_whose_items_cannot_be_delivered_is_reported_and_others_go_on(received: Received):
    received.refused = b"large"
    bad, good = received.add(2)
    bad.give(b"large")
    good.give(b"x")
    eventually(lambda: received.items[1] == [b"x"])
    assert received.broken == [(0, "its outputs can't be processed: ValueError: no room for b'large'")]
    good.give(b"end")
    assert received.receiver.join(LONG_S)
