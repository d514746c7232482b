"""Which rows have the states of which prefixes."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from raycore.kvcache.snapshots import Snapshots

A, B, C = b"a", b"b", b"c"


def with_states(*digests: bytes, num_rows: int = 2) -> Snapshots:
    made = Snapshots(range(10, 10 + num_rows))
    for digest in digests:
        assert made.write(digest) is not None
        made.complete_plan()
    return made


def test_the_longest_prefix_with_a_state_is_found() -> None:
    made = with_states(A, C)
    assert [made.longest(digests) for digests in ([A, B, C], [A, B], [B], [])] == [3, 1, 0, 0]


def test_the_least_recently_used_state_gives_way() -> None:
    made = with_states(A, B)
    made.read(A)
    made.complete_plan()
    made.write(C)
    made.complete_plan()
    assert (made.longest([A]), made.longest([B]), made.longest([C])) == (1, 0, 1)
    assert made.write(A) is None, "it is there, and is used"
    made.write(B)
    made.complete_plan()
    assert (made.longest([A]), made.longest([C])) == (1, 0)


def test_a_plan_writes_no_row_that_it_reads_or_writes() -> None:
    made = with_states(A, B)
    read = made.read(A)
    written = made.write(C)
    assert written not in (None, read)
    assert made.write(b"d") is None, "no row is left"
    assert made.write(C) is None
    assert made.longest([C]) == 0, "it isn't there yet"
    made.complete_plan()
    assert made.read(C) == written


def test_a_row_that_is_reserved_stays_until_it_is_let_go() -> None:
    removed: list[bytes] = []
    made = with_states(A, B)
    made.watch([removed.append])
    row = made.reserve()
    assert removed == [A]
    made.write(C)
    made.complete_plan()
    assert removed == [A, B]
    assert made.longest([A]) == 0, "it hasn't arrived"
    assert made.arrived(row, A) == row
    for digest in (B, b"d"):
        made.write(digest)
        made.complete_plan()
        assert made.read(A) == row
        made.complete_plan()
    made.let_go(row)
    made.read(b"d")
    made.complete_plan()
    made.write(B)
    made.complete_plan()
    assert made.longest([A]) == 0
    made.check_integrity()


def test_a_state_that_has_come_before_is_read_where_it_is() -> None:
    made = with_states(num_rows=3)
    rows = [made.reserve(), made.reserve()]
    assert made.has_room()
    assert [made.arrived(row, A) for row in rows] == [rows[0]] * 2
    made.let_go(rows[0])
    for digest in (B, C, b"d"):
        made.write(digest)
        made.complete_plan()
    assert made.read(A) == rows[0], "one of the two still keeps it"


def test_there_is_no_room_while_all_rows_are_needed() -> None:
    made = with_states(A, B, num_rows=3)
    made.read(A)
    coming = made.reserve()
    assert made.has_room()
    made.write(C)
    assert not made.has_room()
    made.complete_plan()
    made.clear()
    made.let_go(coming)
    made.check_integrity()
    assert len(made._free) == 3


@settings(max_examples=200)
class SnapshotsMachine(RuleBasedStateMachine):
    """Plans in order, as workers carry them out: reads come before writes."""

    def __init__(self) -> None:
        super().__init__()
        self.made = Snapshots(range(3, 6))
        self.contents: dict[int, bytes] = {}
        self.reads: dict[int, bytes] = {}
        self.writes: dict[int, bytes] = {}
        self.coming: list[int] = []
        self.arrived: list[tuple[int, bytes]] = []

    @rule(digest=st.binary(min_size=1, max_size=1))
    def read(self, digest: bytes) -> None:
        if self.made.longest([digest]):
            self.reads[self.made.read(digest)] = digest

    @rule(digest=st.binary(min_size=1, max_size=1))
    def write(self, digest: bytes) -> None:
        row = self.made.write(digest)
        if row is not None:
            assert row not in self.writes
            self.writes[row] = digest
        else:
            is_there = bool(self.made.longest([digest])) or digest in self.writes.values()
            kept = {*self.reads, *self.writes, *self.coming, *(row for row, _ in self.arrived)}
            assert is_there or len(kept) == 3

    @precondition(lambda self: self.made.has_room())
    @rule()
    def reserve(self) -> None:
        row = self.made.reserve()
        assert row not in {*self.reads, *self.writes, *self.coming, *(row for row, _ in self.arrived)}
        self.coming.append(row)

    @precondition(lambda self: self.coming)
    @rule(digest=st.binary(min_size=1, max_size=1))
    def arrive(self, digest: bytes) -> None:
        self.complete()
        row = self.coming.pop()
        kept = self.made.arrived(row, digest)
        assert kept == row or self.contents[kept] == digest
        self.contents[kept] = digest
        self.arrived.append((kept, digest))

    @precondition(lambda self: self.arrived)
    @rule(number=st.integers(0, 5))
    def begin(self, number: int) -> None:
        row, digest = self.arrived.pop(number % len(self.arrived))
        assert self.made.read(digest) == row
        self.reads[row] = digest
        self.made.let_go(row)

    @precondition(lambda self: self.coming)
    @rule()
    def give_up(self) -> None:
        self.made.let_go(self.coming.pop(0))

    @rule()
    def complete(self) -> None:
        assert all(self.contents[row] == digest for row, digest in self.reads.items())
        assert not self.reads.keys() & self.writes.keys()
        self.contents |= self.writes
        self.reads, self.writes = {}, {}
        self.made.complete_plan()

    @rule()
    def clear(self) -> None:
        self.complete()
        self.made.clear()
        for row, _ in self.arrived:
            self.made.let_go(row)
        self.arrived.clear()
        assert not any(self.made.longest([digest]) for digest in self.contents.values())

    @invariant()
    def no_row_is_lost(self) -> None:
        self.made.check_integrity()


TestSnapshots = SnapshotsMachine.TestCase
