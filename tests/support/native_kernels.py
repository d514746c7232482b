"""The native kernels in tests: on this processor and, with a cross-compiler and qemu, on an emulated arm64."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest
import raycore_build
import torch

from raycore.kernels import library
from raycore.models.spec import ClampedSwiglu, Gate

GATES: list[Gate] = ["silu", "gelu", "gelu_tanh", "relu2", ClampedSwiglu(1.7, 3.0)]
"""All gates that kernels know."""

needs_kernels = pytest.mark.skipif(library.load() is None, reason="raycore was installed without its native kernels")

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}
"""The largest error, relative to the numbers that are added up: that of storing the result, or of adding in float32.

Twice the error of one rounding, because a sum that was rounded in float32 may be rounded once more."""

_SOURCES = Path(library.__file__).parent / "csrc"
ARM64_COMPILERS = [("aarch64-linux-gnu-g++",), ("clang++", "--target=aarch64-linux-gnu")]
_EMULATOR = "qemu-aarch64"
_FOLDER = tempfile.TemporaryDirectory()
"""Has the compiled programs. Removed at exit."""
_DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def randn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_near(found: torch.Tensor, expected: torch.Tensor, scale: torch.Tensor | float = 0.0) -> None:
    """`scale`: the size of the numbers that are added up, if the result may be smaller.

    What is too large for the dtype may be infinite.
    """
    assert found.shape == expected.shape
    if not found.numel():
        return
    allowed = ROUNDING[found.dtype] * torch.maximum(expected.abs(), torch.as_tensor(scale, dtype=torch.float64)) + 1e-7
    largest = torch.finfo(found.dtype).max
    worst = ((found.double().clamp(-largest, largest) - expected.clamp(-largest, largest)).abs() - allowed).max()
    assert worst <= 0, f"off by {float(worst)} more than allowed"


NO_GATE = (0, 0.0, 0.0)
"""What has no gate, as the kernels for arm64 get it."""


def size_of_gated(gate: Gate, gate_size: torch.Tensor, up_size: torch.Tensor) -> torch.Tensor:
    """The size of the numbers that are added up, for `assert_near`, if the sums of both halves have these sizes."""
    return (gate_size + 1) ** (2 if gate == "relu2" else 1) * (up_size + 1)


class EmulatedOps:
    """The operations of `torch.ops.raycore`, computed by the kernels for arm64."""

    def __init__(self, program: Path) -> None:
        self._program = program

    def _run(self, name, dtype, sizes, shape, result_dtype, numbers, *operands, changes=None) -> torch.Tensor:
        with tempfile.TemporaryDirectory() as folder:
            for i, operand in enumerate([torch.tensor(numbers, dtype=torch.float32), *operands]):
                (Path(folder) / str(i)).write_bytes(_bytes(operand))
            command = [_EMULATOR, self._program, name, _DTYPES.index(dtype), folder, *sizes]
            subprocess.run([str(part) for part in command], check=True, timeout=60)
            for i, changed in (changes or {}).items():
                changed.copy_(_tensor(Path(folder) / str(i), changed.dtype, changed.shape))
            return _tensor(Path(folder) / "out", result_dtype, shape)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
        return self._run("rms_norm", x.dtype, [*x.shape], x.shape, x.dtype, [eps, offset], x, weight)

    def gate_and_mul(self, gate_up: torch.Tensor, gate: int, alpha: float, limit: float) -> torch.Tensor:
        shape = len(gate_up), gate_up.shape[1] // 2
        return self._run("gate_and_mul", gate_up.dtype, [*shape, gate], shape, gate_up.dtype, [alpha, limit], gate_up)

    def few_rows_linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        shape = len(x), len(weight)
        return self._run("few_rows_linear", x.dtype, [*x.shape, len(weight)], shape, x.dtype, [], x, weight)

    def pack_linear(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.ops.raycore.pack_linear(weight)

    def panel_linear(
        self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor, num_outputs: int, residual=None, gate=NO_GATE
    ) -> torch.Tensor:
        """Also computes what `add_panel_linear` and `gated_panel_linear` compute."""
        residual = x[:0] if residual is None else residual
        (kind, *numbers), shape = gate, (len(x), num_outputs // 2 if gate[0] else num_outputs)
        sizes = [*x.shape, num_outputs, _DTYPES.index(packed.dtype), kind]
        return self._run("panel_linear", x.dtype, sizes, shape, x.dtype, numbers, x, packed, bias, residual)

    def add_panel_linear(
        self, residual: torch.Tensor, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor
    ) -> None:
        residual.copy_(self.panel_linear(x, packed, bias, residual.shape[1], residual))

    def gated_panel_linear(self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor, *gate) -> torch.Tensor:
        return self.panel_linear(x, packed, bias, len(packed), gate=gate)

    def integer_linear(self, x, packed, scales, zeros, bias, *numbers, residual=None, gate=NO_GATE) -> torch.Tensor:
        """Also computes what `add_integer_linear` and `gated_integer_linear` compute."""
        *numbers, num_outputs = numbers
        residual = x[:0] if residual is None else residual
        (kind, *of_gate), shape = gate, (len(x), num_outputs // 2 if gate[0] else num_outputs)
        has_offsets = zeros.numel() and zeros.dtype == torch.float32
        sizes = [*x.shape, num_outputs, *map(int, numbers), kind, int(has_offsets)]
        operands = x, packed, scales, zeros, bias, residual
        name = "float8_linear" if packed.dtype == torch.uint8 else "integer_linear"
        return self._run(name, x.dtype, sizes, shape, x.dtype, of_gate, *operands)

    def add_integer_linear(self, *arguments) -> None:
        *arguments, residual = arguments
        residual.copy_(self.integer_linear(*arguments, residual.shape[1], residual=residual))

    def gated_integer_linear(self, *arguments) -> torch.Tensor:
        *arguments, kind, alpha, limit = arguments
        return self.integer_linear(*arguments, len(arguments[1]), gate=(kind, alpha, limit))

    def mask_logits(self, logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
        """Rows of `logits` may be apart, unless there is none with a mask."""
        sizes, padded = (
            [len(rows), logits.shape[1], logits.stride(0)],
            logits.as_strided([_extent(logits)], [1]).clone(),
        )
        found = self._run("mask_logits", logits.dtype, sizes, [len(padded)], logits.dtype, [], padded, rows, masks)
        logits.copy_(found.as_strided(logits.shape, logits.stride()))

    def most_likely(self, logits: torch.Tensor) -> torch.Tensor:
        return self._run("most_likely", logits.dtype, [*logits.shape], (len(logits),), torch.int64, [], logits)

    def draw(self, logits: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
        return self._run("draw", logits.dtype, [*logits.shape], (len(logits),), torch.int64, [], logits, limits)

    def logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, num_likely: int) -> tuple[torch.Tensor, ...]:
        num_rows, sizes = len(logits), [*logits.shape, num_likely]
        count = num_rows * (1 + num_likely)
        packed = self._run("logprobs", logits.dtype, sizes, (12 * count,), torch.uint8, [], logits, token_ids)
        ranks, likely_ids = packed[: 8 * count].view(torch.int64).split([num_rows, num_rows * num_likely])
        own, likely = packed[8 * count :].view(torch.float32).split([num_rows, num_rows * num_likely])
        return own, ranks, likely.view(num_rows, num_likely), likely_ids.view(num_rows, num_likely)

    def attention(
        self,
        qkv,
        norm,
        eps,
        offset,
        turns,
        cache,
        tables,
        rows,
        heads,
        kv_heads,
        block_size,
        window,
        scale,
        cap,
        sinks,
        turns_are_of_rows,
        ends,
    ):
        flags = int(cache.dtype == torch.int8), int(turns_are_of_rows)
        sizes = [len(rows), tables.shape[1], heads, kv_heads, turns.shape[1], block_size, window, *flags]
        shape, numbers = (len(qkv), heads * turns.shape[1]), [eps, offset, scale, cap]
        operands = qkv, norm, turns, cache, tables, rows, sinks, ends
        return self._run("attention", qkv.dtype, sizes, shape, qkv.dtype, numbers, *operands, changes={4: cache})

    def gated_delta(self, *arguments) -> torch.Tensor:
        return self._recurrence("gated_delta", [], *arguments)

    def mamba2(self, *arguments) -> torch.Tensor:
        *arguments, least_time, longest_time = arguments
        return self._recurrence("mamba2", [least_time, longest_time], *arguments)

    def _recurrence(self, name, numbers, *arguments) -> torch.Tensor:
        x, taps, _, _, _, _, conv_states, states, _, _, num_k_heads = arguments
        sizes = [*x.shape, num_k_heads, *states.shape[1:], taps.shape[1]]
        shape, changes = (len(x), states.shape[1] * states.shape[3]), {7: conv_states, 8: states}
        return self._run(name, x.dtype, sizes, shape, x.dtype, numbers, *arguments[:-1], changes=changes)


def emulated_ops(compiler: tuple[str, ...] = ARM64_COMPILERS[0]) -> EmulatedOps:
    """Skips the test if this machine can't compile for arm64 or emulate it."""
    # clang needs the headers and libraries that come with GCC
    for needed in (compiler[0], ARM64_COMPILERS[0][0], _EMULATOR):
        if not shutil.which(needed):
            pytest.skip(f"needs {needed}")
    return EmulatedOps(_program(compiler))


@cache
def _program(compiler: tuple[str, ...]) -> Path:
    program = Path(_FOLDER.name) / f"run_kernel_{compiler[0]}"
    sources = [_SOURCES / "neon.cpp", Path(__file__).parent / "run_kernel.cpp"]
    subprocess.run([*compiler, *raycore_build.FLAGS, "-static", f"-I{_SOURCES}", *sources, "-o", program], check=True)
    return program


def _extent(tensor: torch.Tensor) -> int:
    """How many numbers of its memory a tensor reaches over."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _tensor(path: Path, dtype: torch.dtype, shape) -> torch.Tensor:
    data = bytearray(path.read_bytes())
    return torch.frombuffer(data, dtype=dtype).view(*shape) if data else torch.empty(*shape, dtype=dtype)
