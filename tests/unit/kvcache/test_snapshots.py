"""Which rows have the states of which prefixes."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

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


@settings(max_examples=200)
class SnapshotsMachine(RuleBasedStateMachine):
    """Plans in order, as workers carry them out: reads come before writes."""

    def __init__(self) -> None:
        super().__init__()
        self.made = Snapshots(range(3, 6))
        self.contents: dict[int, bytes] = {}
        self.reads: dict[int, bytes] = {}
        self.writes: dict[int, bytes] = {}

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
            assert is_there or len(self.reads.keys() | self.writes.keys()) == 3

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
        assert not any(self.made.longest([digest]) for digest in self.contents.values())

    @invariant()
    def no_row_is_lost(self) -> None:
        self.made.check_integrity()


TestSnapshots = SnapshotsMachine.TestCase
