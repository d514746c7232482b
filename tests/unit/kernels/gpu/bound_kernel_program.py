"""Launches a kernel by `BoundKernel` and by Triton itself, and prints what the driver was told, as JSON.

For `test_bound_kernel.py`. Triton compiles for a GPU that does nothing.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from idle_cuda import IdleCuda
from triton import knobs

from raycore.kernels.gpu.bound_kernel import BoundKernel

NUM_PARAMETERS = 6
"""The kernel has as many or one more, with the two pointers that Triton adds."""


@triton.jit(do_not_specialize_on_alignment=["rows"])
def scale(x, bias, rows, stride, factor, out, N: tl.constexpr, SIGN: tl.constexpr, HAS_BIAS: tl.constexpr):
    column_N = tl.arange(0, N)
    x_N = tl.load(x + tl.load(rows + tl.program_id(0)) * stride + column_N) * factor
    if HAS_BIAS:
        x_N += tl.load(bias + column_N)
    if SIGN == "minus":
        x_N = -x_N
    tl.store(out + tl.program_id(0) * N + column_N, x_N.to(out.dtype.element_ty))


def cases() -> dict[str, tuple[Any, ...]]:
    """Arguments with which the kernel is launched, one after the other, by what is new in them."""
    x, out, rows = torch.zeros(4, 64), torch.zeros(4, 64), torch.arange(8, dtype=torch.int32)
    return {
        "first": (x, None, rows, 64, 0.5, out),
        "other values": (torch.ones(4, 64), None, rows[4:], 32, 2.0, torch.ones(4, 64)),
        "not aligned": (x.view(-1)[1:], None, rows, 64, 0.5, out),
        "aligned to less": (x, None, rows[1:], 64, 0.5, out),
        "a stride that is no multiple": (x, None, rows, 63, 0.5, out),
        "a stride of one": (x, None, rows, 1, 0.5, out),
        "a long stride": (x, None, rows, 1 << 32, 0.5, out),
        "a long stride that is no multiple": (x, None, rows, (1 << 32) + 1, 0.5, out),
        "another dtype": (x.bfloat16(), None, rows, 64, 0.5, out),
        "rows of another dtype": (x, None, rows.long(), 64, 0.5, out),
    }


def compare(cuda: IdleCuda) -> None:
    cuda.note_parameters(NUM_PARAMETERS)
    constants: dict[str, Any] = {"N": 64, "SIGN": "minus", "HAS_BIAS": False, "num_warps": 2}
    kernel, grid = BoundKernel(scale, **constants), (3, 2, 1)
    by_triton = kernel._launch_by_triton
    others: list[str] = []
    name = ""

    def note_and_launch(*arguments: Any) -> None:
        others.append(name)
        by_triton(*arguments)

    kernel._launch_by_triton = note_and_launch
    results: dict[str, Any] = {}
    for name, arguments in cases().items():
        scale[grid](*arguments, **constants)
        expected = cuda.last_launch()
        num_before = cuda.num_launches
        kernel(grid, *arguments)
        kernel(grid, *arguments)
        results[name] = [expected, cuda.last_launch(), cuda.num_launches - num_before]
    name = "with a hook"
    hooked: list[str] = []
    knobs.runtime.launch_enter_hook.add(lambda metadata: hooked.append(metadata.get()["name"]))
    kernel(grid, *cases()["first"])
    with_bias = BoundKernel(scale, **{**constants, "HAS_BIAS": True})
    x = torch.zeros(4, 64)
    with_bias(grid, x, torch.zeros(64), torch.arange(8, dtype=torch.int32), 64, 0.5, torch.zeros(4, 64))
    print(json.dumps({"launches": results, "by Triton": others, "hooked": hooked}))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        compare(IdleCuda(Path(directory)))
