"""Which rows have the states of which prefixes, for models whose layers keep states.

A prefix consists of whole blocks, and has the digest of its last one. Knows neither requests nor tensors. Workers carry
out plans in order, so a row may be given another state as soon as the plan that reads it is complete.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

NO_ROW = -1
"""Instead of a row: there is none."""


class Snapshots:
    """The rows, and the prefixes whose states they have. The least recently used one gives way to a new one.

    While a plan is made, its rows stay: those that it reads aren't written, and those that it writes aren't read. Rows
    that are reserved for states from elsewhere stay until they are let go.
    """

    def __init__(self, rows: range) -> None:
        self._rows = rows
        self._free = list(reversed(rows))
        self._row_of: OrderedDict[bytes, int] = OrderedDict()
        """By digest, least recently used first."""
        self._read: set[bytes] = set()
        """The digests of the states that the plan reads."""
        self._written: dict[bytes, int] = {}
        """The rows that the plan writes, by digest."""
        self._coming: set[int] = set()
        """Reserved rows whose states haven't arrived."""
        self._kept: Counter[int] = Counter()
        """How many loads haven't let go of a row whose state has arrived."""
        self._removed: Sequence[Callable[[bytes], None]] = ()

    def watch(self, removed: Sequence[Callable[[bytes], None]]) -> None:
        """Call `removed` with the digest of each state that gives way to another one."""
        self._removed = removed

    def longest(self, digests: Sequence[bytes]) -> int:
        """Return the number of blocks of the longest prefix that has a state. `digests`: those of the first blocks."""
        return next((count for count in range(len(digests), 0, -1) if digests[count - 1] in self._row_of), 0)

    def read(self, digest: bytes) -> int:
        """Return the row with the state of a prefix, which `longest` has found or `arrived` has noted, for the plan."""
        self._read.add(digest)
        self._row_of.move_to_end(digest)
        return self._row_of[digest]

    def write(self, digest: bytes) -> int | None:
        """Return a row for the state of a prefix, which the plan computes.

        None: there is one already, or the plan needs all rows for others.
        """
        if digest in self._row_of:
            self._row_of.move_to_end(digest)
            return None
        if digest in self._written or (not self._free and not self._evict()):
            return None
        row = self._written[digest] = self._free.pop()
        return row

    def complete_plan(self) -> None:
        """Note that the plan is complete. Later ones may read what it writes: what it wrote first gives way last."""
        for digest, row in reversed(self._written.items()):
            self._row_of[digest] = row
        self._written.clear()
        self._read.clear()

    # ---- states from elsewhere

    def has_room(self) -> bool:
        """Whether `reserve` would find a row."""
        return bool(self._free) or self._oldest() is not None

    def reserve(self) -> int:
        """Return a row for a state that is loaded. There is one: see `has_room`. `let_go` ends the reservation."""
        found = bool(self._free) or self._evict()
        assert found, "has_room() comes first"
        row = self._free.pop()
        self._coming.add(row)
        return row

    def arrived(self, row: int, digest: bytes) -> int:
        """Note that a reserved row has the state of a prefix, between two plans.

        Returns: the row to read, which stays until `let_go`: another one if the state has come before.
        """
        self._coming.remove(row)
        kept = self._row_of.setdefault(digest, row)
        if kept != row:
            self._free.append(row)
        self._kept[kept] += 1
        return kept

    def let_go(self, row: int) -> None:
        """Note that a load doesn't need its row any more. Does nothing for `NO_ROW`."""
        if row in self._coming:
            self._coming.remove(row)
            self._free.append(row)
        elif self._kept[row]:
            self._kept[row] -= 1

    # ---- all else

    def clear(self) -> None:
        """Forget all states, between two plans. Rows stay reserved whose states haven't arrived."""
        assert not self._written, "complete_plan() comes first"
        self._row_of.clear()
        self._kept.clear()
        self._free = [row for row in reversed(self._rows) if row not in self._coming]

    def check_integrity(self) -> None:
        """Assert that every row is in one place."""
        placed = [*self._free, *self._row_of.values(), *self._written.values(), *self._coming]
        assert sorted(placed) == list(self._rows)
        assert not self._row_of.keys() & self._written.keys()
        assert self._read <= self._row_of.keys()
        assert {row for row, count in self._kept.items() if count} <= set(self._row_of.values())

    def _evict(self) -> bool:
        """Free the row of the least recently used state that may give way. Returns whether there is one."""
        oldest = self._oldest()
        if oldest is None:
            return False
        self._free.append(self._row_of.pop(oldest))
        for removed in self._removed:
            removed(oldest)
        return True

    def _oldest(self) -> bytes | None:
        """The least recently used state that neither the plan reads nor a load keeps."""
        kept = self._kept
        return next((each for each, row in self._row_of.items() if each not in self._read and not kept[row]), None)
