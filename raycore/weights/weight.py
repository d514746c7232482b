"""The weight of a linear layer, in any format, and what fills one."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from raycore.weights.fp8_weight import Fp8Weight
from raycore.weights.integer_parts import IntegerParts
from raycore.weights.integer_weight import IntegerWeight

Weight = Tensor | Fp8Weight | IntegerWeight | IntegerParts
"""[O, I], in the model's dtype, in fp8, or in integers."""

Part = tuple[int | slice, ...]
"""The index that selects a part of a tensor."""


class Fill(Protocol):
    """Fills `out` with a part of the tensor `name`. The whole tensor must have `expected_shape`."""

    def __call__(self, out: Weight, name: str, expected_shape: tuple[int, ...], part: Part) -> None: ...
