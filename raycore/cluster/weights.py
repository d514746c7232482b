"""What decides about ranks with old weights: see `raycore.parts.weights`."""

from __future__ import annotations

__all__ = ["OnStaleRank"]

from raycore.parts.weights.cluster import OnStaleRank
