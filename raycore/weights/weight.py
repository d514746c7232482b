"""The weight of a linear layer, in any format."""

from __future__ import annotations

from torch import Tensor

from raycore.weights.fp8_weight import Fp8Weight
from raycore.weights.integer_parts import IntegerParts
from raycore.weights.integer_weight import IntegerWeight

Weight = Tensor | Fp8Weight | IntegerWeight | IntegerParts
"""[O, I], in the model's dtype, in fp8, or in integers."""
