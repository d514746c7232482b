"""Which rows have the states of which prefixes, for models whose layers keep states.

A prefix consists of whole blocks, and has the digest of its last one. Knows neither requests nor tensors. Workers carry
out plans in order, so a row may be given another state as soon as the plan that reads it is complete.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class Snapshots:
    """The rows, and the prefixes whose states they have. The least recently used one gives way to a new one.

    While a plan is made, its rows stay: those that it reads aren't written, and those that it writes aren't read.
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

    def longest(self, digests: Sequence[bytes]) -> int:
        """Return the number of blocks of the longest prefix that has a state. `digests`: those of the first blocks."""
        return next((count for count in range(len(digests), 0, -1) if digests[count - 1] in self._row_of), 0)

    def read(self, digest: bytes) -> int:
        """Return the row with the state of a prefix, which `longest` has found, for the plan."""
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

    def clear(self) -> None:
        """Forget all states, between two plans."""
        assert not self._written, "complete_plan() comes first"
        self._row_of.clear()
        self._free = list(reversed(self._rows))

    def check_integrity(self) -> None:
        """Assert that every row is in one place."""
        assert sorted([*self._free, *self._row_of.values(), *self._written.values()]) == list(self._rows)
        assert not self._row_of.keys() & self._written.keys()
        assert self._read <= self._row_of.keys()

    def _evict(self) -> bool:
        """Free the row of the least recently used state. Returns whether there is one that the plan doesn't read."""
        oldest = next((digest for digest in self._row_of if digest not in self._read), None)
        if oldest is None:
            return False
        self._free.append(self._row_of.pop(oldest))
        return True
