"""Makes Triton interpret kernels where there is no GPU, so that tests can run them on CPU tensors.

Triton decides when `@triton.jit` is applied whether a kernel is compiled or interpreted, and it applies it to its own
library when it is imported. So the environment variable has to be set before anything imports Triton: import this
module before any module with kernels. With a GPU, the same tests run compiled kernels.

The interpreter runs programs one after the other. Its `tl.dot` is wrong in bfloat16: use the dtypes in `DTYPES`. It
rounds to fp8 wrongly: small numbers, and what becomes a power of two. So torch does that here. Its `tl.dot` calls a
BLAS library, and on some processors a row's bits then depend on its place in the tile. So products are added up here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where the kernels' tensors have to be."""

if DEVICE.type == "cpu":
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("Triton was imported before interpreted_triton, so it compiles kernels. Import it later.")
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton", reason="there is no Triton for this platform")


def _round_by_torch(convert: Callable[..., Any]) -> Callable[..., Any]:
    """`convert`, a function of the interpreter, for all dtypes but fp8."""
    formats = {"fp8e4nv": torch.float8_e4m3fn, "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}

    def converted(numbers: Any, source: Any, target: Any, rounding: Any) -> Any:
        if "fp8e4nv" not in (source.name, target.name):
            return convert(numbers, source, target, rounding)
        given = torch.from_numpy(np.ascontiguousarray(numbers)).view(formats[source.name])
        bits = f"uint{target.primitive_bitwidth}"
        return given.to(formats[target.name]).view(getattr(torch, bits)).numpy().reshape(numbers.shape)

    return converted


def _dot(builder: Any, a: Any, b: Any, sums: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """`create_dot` of the interpreter, which adds up each row's products in the order of the inputs."""

    def wide(given: Any) -> Any:
        numbers = given.data
        if given.dtype.name == "fp8e4nv":
            numbers = interpreter._convert_float(numbers, given.dtype, interpreter.tl.float16, None).view(np.float16)
        return numbers.astype(sums.data.dtype)

    products = wide(a)[..., :, :, None] * wide(b)[..., None, :, :]
    return interpreter.TensorHandle(np.add.reduce(products, axis=-2) + sums.data, sums.dtype.scalar)


def _patch_if_needed(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`patch`, a function of the interpreter, unless the language is patched.

    The interpreter calls it for each kernel, and again for each call of a device function. It ignores what the latter
    calls return.
    """

    def patched(function: Any) -> Any:
        named = function.__globals__.values()
        languages = [each for each in (interpreter.tl, interpreter.tl.core) if any(each is value for value in named)]
        is_patched = languages and all(each.load.__module__ == interpreter.__name__ for each in languages)
        return None if is_patched else patch(function)

    return patched


if DEVICE.type == "cpu":
    from triton.runtime import interpreter

    # checks for integer overflow are slow, and without `debug` nothing is done with their results
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter._patch_lang = _patch_if_needed(interpreter._patch_lang)
    interpreter._convert_float = _round_by_torch(interpreter._convert_float)
    interpreter.InterpreterBuilder.create_dot = _dot

DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE.type == "cuda" else [])
"""The dtypes that kernels can be tested with."""
