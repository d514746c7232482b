"""What placement can refuse.

::

    PlacementShortage               the cluster can't hold what was asked for
    ReservationCancelled            whoever asked for it doesn't want it any more
    InvalidPlacementGroup (ValueError)   a group that the caller brought doesn't fit the shape
"""

from __future__ import annotations


class PlacementShortage(Exception):
    """The cluster can't hold what was asked for. The message holds both, as a table."""


class ReservationCancelled(Exception):
    """Whoever asked for it doesn't want it any more. Nothing stays reserved."""


class InvalidPlacementGroup(ValueError):
    """A placement group that the caller brought can't hold a rank. The message says what it has and what it needs."""
