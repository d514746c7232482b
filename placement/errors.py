"""The errors that placement raises.

::

    PlacementShortage                    the ranks don't fit the cluster
    ReservationCancelled                 the caller cancelled a reservation that was waiting
    InvalidPlacementGroup (ValueError)   the caller's placement group can't hold a rank
        PlacementGroupRemoved            it was removed
"""

from __future__ import annotations


class PlacementShortage(Exception):
    """The ranks don't fit the cluster. The message has a table of what was requested and what each node has."""

    def __init__(self, table: str, *remarks: str) -> None:
        super().__init__("\n".join([table, *remarks]))
        self.table = table
        """What was requested, and what each node has."""
        self.remarks = remarks
        """How long the wait was, and what to do: a line each."""


class ReservationCancelled(Exception):
    """The caller cancelled a reservation that was waiting. Nothing stays reserved."""


class InvalidPlacementGroup(ValueError):
    """A placement group that the caller created can't hold a rank. The message says what the group lacks."""


class PlacementGroupRemoved(InvalidPlacementGroup):
    """A placement group that the caller created was removed, so no rank can run in it any more."""
