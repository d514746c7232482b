"""A worker's end of a group for weights: see `raycore.parts.weights`."""

from __future__ import annotations

__all__ = ["TRAINER", "WeightGroup"]

from raycore.parts.weights.transfer.group import TRAINER, WeightGroup
