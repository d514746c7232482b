"""What placement can refuse."""

from __future__ import annotations


class PlacementShortage(Exception):
    """The cluster can't hold what was asked for. The message holds both, as a table."""
