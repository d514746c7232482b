"""A linear layer in Triton whose rows don't depend on each other, to the last bit.

Libraries choose a kernel, and with it the order in which products are added up, by the number of rows. Here, tiles have
the same shape for every number of rows, and a program adds up all products of a tile from the first input to the last.
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

_ROWS, _OUTPUTS, _INPUT_BYTES = 64, 64, 128
"""The tile's shape. With so few outputs in a tile, one row alone still gives work to most processors of a GPU."""
_BAND = tl.constexpr(16)
"""So many tiles of rows are computed with the same weights, one after the other, while the cache holds both."""


def batch_invariant_linear(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, residual_TO: Tensor | None = None
) -> Tensor:
    """Return `x @ weight.T + bias`, [T, O], as a new tensor.

    With `residual_TO`, which is contiguous, the residual is added, too, and the sum is written over it and returned.
    All numbers are added in float32, and rounded once. All tensors have the same dtype.
    """
    (num_rows, num_inputs), num_outputs = x_TI.shape, weight_OI.shape[0]
    assert weight_OI.is_contiguous(), "weight [O, I] is contiguous"
    assert x_TI.stride(1) == 1 or num_inputs == 1, "rows must be contiguous"
    assert residual_TO is None or residual_TO.is_contiguous(), "residual [T, O] is contiguous"
    out_TO = residual_TO
    if out_TO is None:
        out_TO = torch.empty((num_rows, num_outputs), dtype=x_TI.dtype, device=x_TI.device)
    if num_rows:
        kernel = bound(
            _linear,
            I=num_inputs,
            O=num_outputs,
            HAS_BIAS=bias_O is not None,
            HAS_RESIDUAL=residual_TO is not None,
            ROWS=_ROWS,
            OUTPUTS=_OUTPUTS,
            INPUTS=_INPUT_BYTES // x_TI.element_size(),
            num_warps=4,
            num_stages=4,
        )
        grid = triton.cdiv(num_rows, _ROWS) * triton.cdiv(num_outputs, _OUTPUTS), 1, 1
        stride = x_TI.stride(0) if num_rows > 1 else num_inputs
        kernel(grid, x_TI, weight_OI, weight_OI if bias_O is None else bias_O, out_TO, num_rows, stride)
    return out_TO


# one row, or a multiple of 16 rows, must not get a kernel of their own
@triton.jit(do_not_specialize=["num_rows"])
def _linear(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    x_stride,
    I: tl.constexpr,  # noqa: E741  # the dimension's letter
    O: tl.constexpr,  # noqa: E741
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """One program computes one tile of the output."""
    num_tiles_O: tl.constexpr = (O + OUTPUTS - 1) // OUTPUTS
    num_tiles_T = tl.cdiv(num_rows, ROWS)
    program = tl.program_id(0)
    band = program // (_BAND * num_tiles_O)
    num_in_band = tl.minimum(num_tiles_T - band * _BAND, _BAND)
    in_band = program % (_BAND * num_tiles_O)
    row_T = (band * _BAND + in_band % num_in_band) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    output_O = (in_band // num_in_band) * OUTPUTS + tl.arange(0, OUTPUTS).to(tl.int64)
    input_I = tl.arange(0, INPUTS)
    is_row_T, is_output_O = row_T < num_rows, output_O < O

    x_ptrs_TI = x_ptr + row_T[:, None] * x_stride + input_I[None, :]
    weight_ptrs_IO = weight_ptr + output_O[None, :] * I + input_I[:, None]
    sum_TO = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for start in range(0, I, INPUTS):
        is_input_I = start + input_I < I
        x_TI = tl.load(x_ptrs_TI + start, mask=is_row_T[:, None] & is_input_I[None, :], other=0.0)
        weight_IO = tl.load(weight_ptrs_IO + start, mask=is_output_O[None, :] & is_input_I[:, None], other=0.0)
        sum_TO = tl.dot(x_TI, weight_IO, sum_TO, input_precision="ieee")

    if HAS_BIAS:
        sum_TO += tl.load(bias_ptr + output_O, mask=is_output_O, other=0.0).to(tl.float32)[None, :]
    out_ptrs_TO = out_ptr + row_T[:, None] * O + output_O[None, :]
    is_out_TO = is_row_T[:, None] & is_output_O[None, :]
    if HAS_RESIDUAL:
        sum_TO += tl.load(out_ptrs_TO, mask=is_out_TO, other=0.0).to(tl.float32)
    tl.store(out_ptrs_TO, sum_TO.to(out_ptr.dtype.element_ty), mask=is_out_TO)
