"""Linear layers that multiply in 8-bit floating point, on tensor cores of GPUs that have such instructions.

Every row of activations is quantized when it comes, with its own scale, like every row of the weight. So the product is
exact up to the rounding of both: about 2 % of a typical result.
"""

from __future__ import annotations

# parts of torch are partially typed:
# pyright: reportUnknownMemberType=false
from collections.abc import Callable

import torch
from torch import Tensor

from raycore.weights.fp8_weight import FP8, Fp8Weight

LEAST_CAPABILITY = (8, 9)
"""The first CUDA compute capability with products of fp8: that of Ada. Hopper is 9.0."""
MULTIPLE = 16
"""The number of a layer's inputs and that of its outputs must be multiples of this."""

QuantizeRows = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Quantizes rows like `fp8_weight.quantize_rows`."""


class Fp8Linear:
    """A linear layer with an fp8 weight. Results have the dtype of `x`, but are rounded to bfloat16."""

    def __init__(self, weight: Fp8Weight, bias_O: Tensor | None, quantize_rows: QuantizeRows) -> None:
        self._values_IO = weight.values_OI.t()
        self._scales_1O = weight.scales_O.unsqueeze(0)
        self.bias = None if bias_O is None else bias_O.bfloat16()
        self._quantize_rows = quantize_rows

    @property
    def weight(self) -> Fp8Weight:
        return Fp8Weight(self._values_IO.t(), self._scales_1O.squeeze(0))

    def __call__(self, x_TI: Tensor) -> Tensor:
        if not len(x_TI):
            # not all of torch's kernels multiply matrices without rows
            return x_TI.new_empty(0, self._values_IO.shape[1])
        values_TI, scales_T1 = self._quantize_rows(x_TI)
        return scaled_product(values_TI, self._values_IO, scales_T1, self._scales_1O, self.bias).to(x_TI.dtype)

    def add_to(self, residual_TO: Tensor, x_TI: Tensor) -> Tensor:
        return residual_TO.add_(self(x_TI))


def scaled_product(
    a_TI: Tensor, b_IO: Tensor, a_scales_T1: Tensor, b_scales_1O: Tensor, bias_O: Tensor | None
) -> Tensor:
    """Return `(a · a_scales) @ (b · b_scales) + bias` in bfloat16, [T, O].

    `a_TI` and `b_IO` are float8_e4m3fn, `b_IO` column by column in memory, the scales float32, `bias_O` bfloat16. Sums
    are accumulated with the precision of the tensor cores, which on Hopper is a bit less than float32.
    """
    # With scales of rows, bfloat16 is the only dtype of results that all of torch's kernels have.
    return torch._scaled_mm(  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        a_TI, b_IO, scale_a=a_scales_T1, scale_b=b_scales_1O, bias=bias_O, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def unsupported_reason(device: torch.device) -> str | None:
    """Return why fp8 products can't be computed on `device`, or None if they can."""
    if device.type != "cuda":
        return f"products in fp8 need a GPU, and the device is {device.type!r}"
    return why_no_fp8(device) or _failure_of_a_product(device)


def why_no_fp8(device: torch.device) -> str | None:
    """Return why a GPU doesn't know numbers in fp8, or None if it does."""
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < LEAST_CAPABILITY:
        least = ".".join(map(str, LEAST_CAPABILITY))
        return (
            f"fp8 needs a GPU with compute capability {least} or more, and "
            f"{torch.cuda.get_device_name(device)} has {major}.{minor}"
        )
    return None


def _failure_of_a_product(device: torch.device) -> str | None:
    """Multiply small matrices. Some GPUs are new enough, but this torch has no kernel for them."""
    zeros = torch.zeros(MULTIPLE, MULTIPLE, device=device).to(FP8)
    ones = torch.ones(MULTIPLE, 1, device=device)
    try:
        scaled_product(zeros, zeros.t(), ones, ones.t(), None)
    except (RuntimeError, ValueError) as error:
        return f"torch {torch.__version__} can't multiply in fp8 on {device}: {error}"
    return None
