"""A grammar that tests can compute by hand."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from raycore.errors import InvalidRequest


class Counted:
    """A grammar whose outputs are 1, 2, 3, …, and which can't follow anything else. Stands in for `TokenMatcher`."""

    needs_native_mask = False

    def follow(self, output: NDArray[np.int32]) -> None:
        self.length = len(output)
        if output.tolist() != list(range(1, self.length + 1)):
            raise InvalidRequest(f"{output.tolist()} isn't counted")

    def complete(self, bits_B: NDArray[np.uint8]) -> None:
        token = self.length + 1
        bits_B[token >> 3] |= 1 << (token & 7)
