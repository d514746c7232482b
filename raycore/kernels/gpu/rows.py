"""Norms and gates, computed row by row in Triton.

Numbers are stored in float16, bfloat16 or float32, and computed in float32. Every result is rounded once. One program
computes a row, or a part of it, so a row's bits don't depend on other rows.

Triton loads aligned rows in larger pieces, and then adds up a norm's squares in another order. So a row's bits are the
same wherever it is only if all such rows start at a multiple of 16 bytes, or none does.
"""

from __future__ import annotations

# Triton is untyped:
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUntypedFunctionDecorator=false, reportArgumentType=false, reportCallIssue=false
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from raycore.kernels.gates import gate_arguments
from raycore.kernels.gpu import gates
from raycore.kernels.gpu.bound_kernel import BoundKernel
from raycore.models.spec import Gate

_COLUMNS = 1024
"""Number of columns of a gate that one program computes."""


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Return `x / sqrt(mean(x²) + eps) · (offset + weight)` over the last dimension, as a new tensor.

    `x` has one to three dimensions, the last one contiguous.
    """
    dim = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        assert x.dim() <= 3, "rows have at most two indexes"
        num_heads = x.shape[1] if x.dim() == 3 else 1
        strides = _stride(x, 0), _stride(x, 1) if x.dim() == 3 else dim
        _norm_kernel(num_heads, dim, offset)((out.numel() // dim, 1, 1), x, weight_D, out, *strides, eps)
    return out


def gate_and_mul(gate: Gate, gate_up_TF: Tensor) -> Tensor:
    """Return `activation(gate) · up`, or what `gate` says instead, a new tensor [T, F].

    `gate_up_TF` has the gate columns, then the up columns.
    """
    num_rows, dim = gate_up_TF.shape[0], gate_up_TF.shape[1] // 2
    out_TF = torch.empty((num_rows, dim), dtype=gate_up_TF.dtype, device=gate_up_TF.device)
    if out_TF.numel():
        grid = num_rows, -(-dim // _COLUMNS), 1
        _gate_kernel(gate, dim)(grid, gate_up_TF, out_TF, _stride(gate_up_TF, 0))
    return out_TF


def _stride(x: Tensor, dim: int) -> int:
    """Return the stride of a dimension of rows.

    Torch leaves open what it is if there is only one row. Triton compiles different kernels for different strides, so
    it is then the row's size.
    """
    assert x.stride(-1) == 1 or x.shape[-1] == 1, "rows must be contiguous"
    return x.stride(dim) if x.dim() > 1 and x.shape[dim] > 1 else x.shape[-1]


@cache
def _norm_kernel(num_heads: int, dim: int, offset: float) -> BoundKernel:
    """A program computes a whole row. How it does depends on the row's size alone, for the same sums."""
    block = triton.next_power_of_2(dim)
    num_warps = min(max(block // 512, 1), 16)
    return BoundKernel(_rms_norm, num_heads=num_heads, D=dim, OFFSET=offset, BLOCK=block, num_warps=num_warps)


@cache
def _gate_kernel(gate: Gate, dim: int) -> BoundKernel:
    name, alpha, limit = gate_arguments(gate)
    return BoundKernel(_gate_and_mul, F=dim, BLOCK=_COLUMNS, GATE=name, ALPHA=alpha, LIMIT=limit)


@triton.jit
def _rms_norm(
    x_ptr,
    weight_ptr,
    out_ptr,
    token_stride,
    head_stride,
    eps,
    num_heads: tl.constexpr,
    D: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program normalizes one head of a token."""
    row = tl.program_id(0).to(tl.int64)
    columns_D = tl.arange(0, BLOCK)
    is_column_D = columns_D < D
    start = row // num_heads * token_stride + row % num_heads * head_stride
    x_D = tl.load(x_ptr + start + columns_D, mask=is_column_D, other=0.0).to(tl.float32)
    weight_D = tl.load(weight_ptr + columns_D, mask=is_column_D, other=0.0).to(tl.float32)
    if OFFSET != 0.0:
        weight_D += OFFSET
    out_D = x_D * (1.0 / tl.sqrt(tl.sum(x_D * x_D, axis=0) / D + eps)) * weight_D
    tl.store(out_ptr + row * D + columns_D, out_D.to(out_ptr.dtype.element_ty), mask=is_column_D)


@triton.jit
def _gate_and_mul(
    gate_up_ptr,
    out_ptr,
    stride,
    F: tl.constexpr,
    BLOCK: tl.constexpr,
    GATE: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """One program computes BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns_F = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column_F = columns_F < F
    gate_ptrs_F = gate_up_ptr + row * stride + columns_F
    gate_F = tl.load(gate_ptrs_F, mask=is_column_F, other=0.0).to(tl.float32)
    up_F = tl.load(gate_ptrs_F + F, mask=is_column_F, other=0.0).to(tl.float32)
    out_F = gates.gate_and_mul(gate_F, up_F, GATE, ALPHA, LIMIT)
    tl.store(out_ptr + row * F + columns_F, out_F.to(out_ptr.dtype.element_ty), mask=is_column_F)
