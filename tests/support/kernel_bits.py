"""Prints a digest of what each native kernel computes of fixed numbers, by instruction set, as JSON.

usage: kernel_bits.py LIBRARY
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch

from raycore.kernels import library

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INSTRUCTION_SETS = ["avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx", "neon"]
EPS = 1e-6
NOTHING = torch.empty(0)
SILU = 1, 0.0, 0.0


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def integers(low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(0))


def rowwise(ops: Any, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    x = (numbers(1, 37, 602) * 4).to(dtype)
    yield ops.rms_norm(x, x[0].clone(), EPS, 0.0)
    yield ops.gate_and_mul(x, *SILU)
    logits = (numbers(2, 9, 5003) * 6).to(dtype)
    limits = torch.tensor([[0.8, 0.0, 40.0 + i, 0.9, i / 9] for i in range(9)], dtype=torch.float64)
    yield ops.most_likely(logits)
    masked = logits.float()
    ops.mask_logits(masked, torch.tensor([1, 8]), integers(0, 256, 2, 628).to(torch.uint8))
    yield masked
    yield ops.draw(logits, limits)
    yield from ops.logprobs(logits, integers(0, 5003, 9), 20)


def gates(ops: Any, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    x = (numbers(1, 37, 602) * 4).to(dtype)
    for gate in range(2, 6):
        yield ops.gate_and_mul(x, gate, 1.7, 3.0)
    yield from linear(ops, dtype, (2, 0.0, 0.0))


def linear(ops: Any, dtype: torch.dtype, gate: tuple[int, float, float] = SILU) -> Iterator[torch.Tensor]:
    no_bias = torch.empty(0, dtype=dtype)
    stored = [dtype] if dtype != torch.float32 else DTYPES
    for num_rows, num_inputs, num_outputs in ((1, 70, 33), (7, 320, 96), (50, 1100, 160), (251, 64, 64)):
        x = numbers(3, num_rows, num_inputs).to(dtype)
        for each in stored:
            weight, residual = numbers(4, num_outputs, num_inputs).to(each), numbers(5, num_rows, num_outputs)
            packed, residual = ops.pack_linear(weight), residual.to(dtype)
            yield ops.panel_linear(x, packed, residual[0].clone(), num_outputs)
            ops.add_panel_linear(residual, x, packed, no_bias)
            yield residual
            if num_outputs % 32 == 0:
                yield ops.gated_panel_linear(x, packed, no_bias, *gate)
        yield ops.few_rows_linear(x[:7], weight.to(dtype))


def integer_linear(ops: Any, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    bias = torch.empty(0, dtype=dtype)
    no_zeros = torch.empty(0, dtype=torch.uint8)
    for bits, group_size in ((4, 32), (8, 512)):
        packed = integers(-(1 << 31), 1 << 31, 64, 512 * bits // 32).int()
        scales = numbers(6, 4, 512 // group_size, 16) / 50
        some_zeros = integers(0, 16, *scales.shape).to(torch.uint8)
        offsets = numbers(8, *scales.shape)
        cases = [(no_zeros, False), (some_zeros, False), (offsets, False)] + [(no_zeros, True)] * (bits == 4)
        for zeros, is_e2m1 in cases:
            for rows, num_rows in product(((8, 0), (8, 32), (16, 0)), (1, 3, 4, 19)):  # each way of placing rows
                x = numbers(7, num_rows, 512).to(dtype)
                yield ops.integer_linear(x, packed, scales, zeros, bias, bits, *rows, group_size, is_e2m1, 64)


def float8_linear(ops: Any, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    bias, nothing = torch.empty(0, dtype=dtype), torch.empty(0, dtype=torch.uint8)
    values = (numbers(23, 96, 640) * 40).to(torch.float8_e4m3fn)
    packed = ops.pack_linear(values.view(torch.uint8))
    for group_size in (32, 128, 640):
        scales = numbers(24, 6, 640 // group_size, 16) / 50
        for num_rows in (1, 3, 7, 19, 101):  # each way of placing rows
            x = numbers(25, num_rows, 640).to(dtype)
            yield ops.integer_linear(x, packed, scales, nothing, bias, 8, 16, 0, group_size, False, 96)


def lora(ops: Any, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    a, b = ops.pack_linear(numbers(8, 16, 130).to(dtype)), ops.pack_linear(numbers(9, 200, 16).to(dtype))
    adapters = torch.zeros(1, 17, dtype=torch.int64)
    adapters[0, :7] = torch.tensor([a.data_ptr(), 16, b.data_ptr(), 0, 16, 0, 200])
    rows = torch.arange(23)
    products = ops.lora_shrink(numbers(10, 23, 130).to(dtype), rows, rows * 0, adapters, 16)
    yield products
    y = numbers(11, 23, 200).to(dtype)
    ops.lora_expand(y, products, rows, rows * 0, adapters)
    yield y


def attention(
    ops: Any, dtype: torch.dtype, offset: float = 0.0, softcap: float = 0.0, sinks: torch.Tensor = NOTHING
) -> Iterator[torch.Tensor]:
    """A prefill, then a step of a longer prefill and a decode."""
    for head_dim, block_size, window, scaled in ((32, 16, 0, 0), (80, 24, 100, 0), (128, 32, 0, 1), (24, 16, 50, 1)):
        angles = numbers(12, 600, head_dim // 2)
        turns = torch.stack([angles.cos(), angles.sin()], -1).flatten(1)
        shape = 60, 2, 2, block_size * (head_dim + 4 * scaled)
        cache = torch.zeros(shape, dtype=torch.int8 if scaled else dtype)
        tables = torch.arange(60, dtype=torch.int32).view(2, 30)
        norm = numbers(13, 8, head_dim).to(dtype)
        sizes = 6, 2, block_size, window, head_dim**-0.5
        for sequences in ([[0, 0, 70, 0], [1, 70, 300, 0]], [[0, 0, 40, 70], [1, 40, 1, 300]], [[1, 0, 1, 301]]):
            count = sum(tokens for _, _, tokens, _ in sequences)
            qkv = numbers(14 + count, count, 10 * head_dim).to(dtype)
            rows = torch.tensor(sequences, dtype=torch.int32)
            plain = False, torch.empty(0, dtype=torch.int32)
            yield ops.attention(qkv, norm, EPS, offset, turns, cache, tables, rows, *sizes, softcap, sinks, *plain)
        yield cache


def attention_with_parts(ops: Any, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """With an offset of norms, a cap of scores, and a sink of each head."""
    yield from attention(ops, dtype, offset=1.0, softcap=2.0, sinks=numbers(15, 6))


def two_sided_attention(ops: Any, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Whole sequences, with rotations and without."""
    sequences = torch.tensor([[0, 0, 300, 0], [1, 300, 7, 0], [2, 307, 40, 0]], dtype=torch.int32)
    for head_dim, window in ((32, 0), (24, 50), (64, 20)):
        angles = numbers(21, 300, head_dim // 2)
        turns = torch.stack([angles.cos(), angles.sin()], -1).flatten(1)
        for own_turns in (turns, NOTHING):
            qkv = numbers(22, 347, 3 * 4 * head_dim).to(dtype)
            yield ops.two_sided_attention(qkv, own_turns, sequences, 4, window, head_dim**-0.5)


def recurrence(ops: Any, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Sequences with one token and longer ones, of both kinds of layers."""
    sequences = torch.tensor([[0, 1, 0, 0], [1, 1, -1, 1], [2, 40, 2, 3], [42, 3, -1, 4]], dtype=torch.int32)
    saves = torch.tensor([[2, 7, 5], [3, 1, 6]], dtype=torch.int32)
    for num_keys, num_heads, k_dim, v_dim, conv_size in ((2, 4, 128, 128, 4), (1, 3, 40, 70, 3), (1, 1, 16, 24, 2)):
        num_channels = 2 * num_keys * k_dim + num_heads * v_dim
        taps, x = numbers(16, num_channels, conv_size).to(dtype), numbers(17, 45, num_channels + 2 * num_heads)
        decay, bias, skip = numbers(18, 3, num_heads)
        for name in ("gated_delta", "mamba2"):
            inputs, options = (x, ()) if name == "gated_delta" else (x[:, :-num_heads], (0.1, 2.0))
            conv_states = numbers(19, 7, num_channels, conv_size - 1).to(dtype)
            states = numbers(20, 7, num_heads, k_dim, v_dim)
            conv_bias = taps[:, 0].contiguous() if options else torch.empty(0, dtype=dtype)
            parts = inputs.contiguous().to(dtype), taps, conv_bias, decay, bias, skip, conv_states, states
            yield getattr(ops, name)(*parts, sequences, saves, num_keys, *options)
            yield from (conv_states, states)


def latent_attention(ops: Any, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """The projections of heads, a prefill, then a step of a longer prefill and a decode, then two decodes."""
    for num_heads, rank, num_rotated, block_size in ((3, 24, 6, 16), (16, 130, 64, 48)):
        x, out = numbers(16, 70, num_heads, 32).to(dtype), torch.zeros(70, num_heads, rank, dtype=dtype)
        weights = [numbers(17 + head, rank, 32).to(dtype) for head in range(num_heads)]
        ops.head_linear(x, torch.stack([ops.pack_linear(weight) for weight in weights]), out)
        yield out
        angles = numbers(12, 900, num_rotated // 2)
        turns = torch.stack([angles.cos(), angles.sin()], -1).flatten(1)
        cache = torch.zeros(120, block_size * (rank + num_rotated), dtype=dtype)
        tables = torch.arange(120, dtype=torch.int32).view(2, 60)
        norm = numbers(13, rank).to(dtype)
        for sequences in (
            [[0, 0, 70, 0], [1, 70, 600, 0]],
            [[0, 0, 40, 70], [1, 40, 1, 600]],
            [[0, 0, 1, 110], [1, 1, 1, 601]],
        ):
            count = sum(tokens for _, _, tokens, _ in sequences)
            fused = numbers(14 + count, count, (num_heads + 1) * (rank + num_rotated)).to(dtype)
            rows = torch.tensor(sequences, dtype=torch.int32)
            sizes = num_heads, block_size, 0.1
            yield ops.latent_attention(fused, norm, EPS, turns, cache, tables, rows, *sizes)
        yield cache


def divided_attention(ops: Any, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """A prefill and a decode by two workers, each with a share of the keys, and their results together."""
    for head_dim, block_size, window, scaled in ((32, 16, 0, 0), (80, 24, 100, 0), (128, 32, 0, 1), (24, 16, 50, 1)):
        angles = numbers(16, 600, head_dim // 2)
        turns = torch.stack([angles.cos(), angles.sin()], -1).flatten(1)
        shape = 60, 2, 2, block_size * (head_dim + 4 * scaled)
        caches = [torch.zeros(shape, dtype=torch.int8 if scaled else dtype) for _ in range(2)]
        tables = torch.arange(60, dtype=torch.int32).view(2, 30)
        norm = numbers(17, 8, head_dim).to(dtype)
        for sequences in ([[0, 0, 70, 0], [1, 70, 300, 0]], [[1, 0, 1, 300]]):
            count = sum(tokens for _, _, tokens, _ in sequences)
            rows, parts = torch.tensor(sequences, dtype=torch.int32), []
            for owner, cache in enumerate(caches):
                qkv, shared = numbers(18, count, 10 * head_dim).to(dtype), (2, owner)
                ops.store_owned_keys(qkv, norm, EPS, 0.0, turns, cache, tables, rows, 6, 2, block_size, *shared)
                q = qkv[:, : 6 * head_dim].contiguous()
                sizes = 6, 2, block_size, window, head_dim**-0.5, 2.0
                parts.append(ops.attend_to_owned_keys(q, cache, tables, rows, *sizes, *shared))
            yield ops.merge_parts(torch.stack(parts).view(2, count, 6, -1), numbers(19, 6), norm)
        yield from caches


KERNELS = (
    rowwise,
    gates,
    linear,
    integer_linear,
    float8_linear,
    lora,
    attention,
    attention_with_parts,
    two_sided_attention,
    divided_attention,
    latent_attention,
    recurrence,
)


def digest(tensors: Iterable[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def refusal() -> str:
    try:
        torch.ops.raycore.gate_and_mul(torch.zeros(3, 3), *SILU)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "none"


def digests(ops: Any, kernels: Iterable[Callable[[Any, torch.dtype], Iterable[torch.Tensor]]]) -> dict[str, str]:
    """A digest for each of some kernels and types. `ops`: `torch.ops.raycore`, or what computes the same."""
    return {f"{each.__name__} {dtype}": digest(each(ops, dtype)) for each in kernels for dtype in DTYPES}


def main() -> None:
    library.find = lambda: Path(sys.argv[1])
    assert library.load() is not None
    found: dict[str, object] = {"refusal": refusal()}
    for name in INSTRUCTION_SETS:
        if library.choose(name) is not None:
            found[name] = digests(torch.ops.raycore, KERNELS)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
