"""Rounds rows to 8-bit floating point, in Triton. GPUs have the type from compute capability 8.9 on.

One program quantizes a row, so a row's bits don't depend on other rows.
"""

from __future__ import annotations

# Triton is untyped:
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUntypedFunctionDecorator=false, reportArgumentType=false, reportCallIssue=false
import torch
import triton
import triton.language as tl
from torch import Tensor

from raycore.kernels.gpu.bound_kernel import bound

_LARGEST = tl.constexpr(torch.finfo(torch.float8_e4m3fn).max)
_LEAST_SCALE = tl.constexpr(torch.finfo(torch.float32).tiny)


def quantize_rows(x_TI: Tensor) -> tuple[Tensor, Tensor]:
    """Return `x_TI` in float8_e4m3fn, [T, I], and the float32 scale of each row, [T, 1]. Columns are contiguous.

    The formulas are those of `raycore.weights.fp8_weight.quantize_rows`, except that a NaN stays in its column.
    """
    num_rows, dim = x_TI.shape
    values_TI = torch.empty((num_rows, dim), dtype=torch.float8_e4m3fn, device=x_TI.device)
    scales_T1 = torch.empty((num_rows, 1), dtype=torch.float32, device=x_TI.device)
    if values_TI.numel():
        assert x_TI.stride(1) == 1 or dim == 1, "rows must be contiguous"
        # torch leaves open what the stride of a single row is, and Triton compiles a kernel for each kind of stride
        stride = x_TI.stride(0) if num_rows > 1 else dim
        block = triton.next_power_of_2(dim)
        kernel = bound(_quantize_row, I=dim, BLOCK=block, num_warps=min(max(block // 512, 1), 16))
        kernel((num_rows, 1, 1), x_TI, values_TI, scales_T1, stride)
    return values_TI, scales_T1


@triton.jit
def _quantize_row(x_ptr, values_ptr, scales_ptr, stride, I: tl.constexpr, BLOCK: tl.constexpr):  # noqa: E741
    row = tl.program_id(0).to(tl.int64)
    columns_I = tl.arange(0, BLOCK)
    is_column_I = columns_I < I
    x_I = tl.load(x_ptr + row * stride + columns_I, mask=is_column_I, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x_I), axis=0) / _LARGEST, _LEAST_SCALE)
    tl.store(values_ptr + row * I + columns_I, to_fp8(x_I / scale), mask=is_column_I)
    tl.store(scales_ptr + row, scale)


@triton.jit
def to_fp8(x):
    """Returns float32 numbers in float8_e4m3fn. What is too large becomes the largest number; NaN stays NaN."""
    # minimum and maximum could drop a NaN
    x = tl.where(x > _LARGEST, _LARGEST, x)
    x = tl.where(x < -_LARGEST, -_LARGEST, x)
    return x.to(tl.float8e4nv)
