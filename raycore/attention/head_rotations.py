"""Rotates heads in plain torch, for what prepares queries and keys without kernels."""

from __future__ import annotations

from torch import Tensor

from raycore.layers.rope import Rope, rotate_
from raycore.layers.rows import on_one_thread


class HeadRotations:
    """Rotates the heads of a step's tokens, layer by layer: call `begin`, then `rotate_`."""

    def __init__(self, ropes: list[Rope], *, batch_invariant: bool = False) -> None:
        """`ropes`: by layer. `batch_invariant`: make the bits of each token's heads independent of the other tokens."""
        self._ropes = ropes
        self._distinct_ropes = set(ropes)
        self._batch_invariant = batch_invariant
        self._turns_T1C: dict[Rope, Tensor] = {}

    def begin(self, positions: Tensor) -> None:
        """Look up the rotations of tokens at these positions, [T], or [T, 3] if each has three."""
        self._turns_T1C = {rope: rope.turns(positions) for rope in self._distinct_ropes}

    def rotate_(self, layer: int, heads_TNH: Tensor) -> None:
        """Rotate in place."""
        turns_T1C = self._turns_T1C[self._ropes[layer]]
        if self._batch_invariant:
            on_one_thread(rotate_, heads_TNH, turns_T1C)
        else:
            rotate_(heads_TNH, turns_T1C)
