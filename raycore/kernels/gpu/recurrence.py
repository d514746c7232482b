"""Layers that keep a state for each head, on GPUs: the gated delta rule, and Mamba-2.

`compute` launches three kernels. The first one prepares tokens: the convolution of their channels, and norms of queries
and keys. The second one keeps the convolution's inputs for later steps. The third one computes some columns of one
head of one sequence, token by token: it reads a state once, keeps it in registers, and writes it. A token's bits depend
neither on the step's other sequences nor on how its own one is divided into steps.

Launches depend on the shapes of their arguments only, so that CUDA graphs can capture them. Mamba-2's C and B are
called queries and keys here.

Shape suffixes: n sequences, I tiles, S saves, T tokens, X inputs, N value heads, G key heads, K elements of a key head,
H of a value head, C channels of the convolution, W taps of the convolution, R rows.
"""

from __future__ import annotations

# Triton is untyped:
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUntypedFunctionDecorator=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from raycore.kernels.gpu.bound_kernel import bound
from raycore.kernels.state_tables import TILE_TOKENS, StateTables

_COLUMNS = 16
"""Number of a state's columns that one program keeps in registers: with 128 rows, 64 numbers for each of 32 threads."""
_MAX_K_DIM = 256
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(slots=True, frozen=True)
class Places:
    """The sizes of a layer, and where parts of the channels, and of a token's other inputs, begin."""

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    conv_size: int
    queries: int
    keys: int
    values: int
    times: int
    betas: int | None
    """None: the layer is Mamba-2's, which writes values whole."""
    largest_share: float = 1.0
    """What betas are multiplied by."""
    least_time: float = 0.0
    longest_time: float = float("inf")

    @property
    def num_channels(self) -> int:
        """Number of channels of the convolution."""
        return 2 * self.num_k_heads * self.k_dim + self.num_v_heads * self.v_dim


@dataclass(slots=True, frozen=True)
class LayerTensors:
    """What a layer has beside its projections, and its states. All tensors are contiguous."""

    conv_CW: Tensor
    conv_bias_C: Tensor | None
    decay_N: Tensor
    bias_N: Tensor
    skip_N: Tensor | None
    conv_states_RCW: Tensor
    states_RNKH: Tensor


def unsupported_reason(k_dim: int, dtype: torch.dtype) -> str | None:
    """Return why the kernels can't compute layers with these sizes. None: they can."""
    if k_dim > _MAX_K_DIM:
        return f"states have {k_dim} rows: the GPU kernels expect at most {_MAX_K_DIM}"
    if dtype not in _DTYPES:
        return f"the dtype is {dtype}: the GPU kernels expect float32, bfloat16 or float16"
    return None


def compute(places: Places, layer: LayerTensors, x_TX: Tensor, tables: StateTables) -> Tensor:
    """Return the results, [T, N·H] in the data type of `x_TX`, and write the states.

    Results of tokens that are in no sequence are zeros.
    """
    num_tokens, num_sequences = len(x_TX), len(tables.sequences_n4)
    width = places.num_v_heads * places.v_dim
    out_TX = torch.zeros((num_tokens, width), dtype=x_TX.dtype, device=x_TX.device)
    if not num_tokens or not num_sequences:
        return out_TX
    assert x_TX.stride(1) == 1, "rows of x are contiguous"
    channels_TC = torch.empty((num_tokens, places.num_channels), dtype=torch.float32, device=x_TX.device)
    stride = x_TX.stride(0) if num_tokens > 1 else x_TX.shape[1]
    heads = {"G": places.num_k_heads, "N": places.num_v_heads, "K": places.k_dim, "H": places.v_dim}
    starts = {"QUERIES": places.queries, "KEYS": places.keys, "VALUES": places.values}
    channels = {"C": places.num_channels, "W": places.conv_size}
    block = {"BLOCK": triton.next_power_of_2(max(places.k_dim, places.v_dim))}
    num_heads = 2 * places.num_k_heads + places.num_v_heads
    bias_C = layer.conv_CW if layer.conv_bias_C is None else layer.conv_bias_C
    kernel = bound(
        _prepare,
        **heads,
        **starts,
        **channels,
        **block,
        HAS_BIAS=layer.conv_bias_C is not None,
        HAS_NORMS=places.betas is not None,
        TILE=TILE_TOKENS,
        num_warps=1,
    )
    kernel(
        (len(tables.tiles_I2), num_heads, 1),
        x_TX,
        stride,
        layer.conv_CW,
        bias_C,
        layer.conv_states_RCW,
        tables.sequences_n4,
        tables.tiles_I2,
        channels_TC,
    )
    saves = tables.sequences_n4, tables.save_starts_m, tables.saves_S2
    kernel = bound(_keep_inputs, **heads, **starts, **channels, **block, num_warps=1)
    kernel((num_sequences, num_heads, 1), x_TX, stride, layer.conv_states_RCW, *saves)
    kernel = bound(
        _recur,
        **heads,
        **starts,
        C=places.num_channels,
        TIMES=places.times,
        BETAS=places.betas or 0,
        IS_DELTA=places.betas is not None,
        LARGEST_SHARE=places.largest_share,
        PADDED_K=triton.next_power_of_2(places.k_dim),
        COLUMNS=_COLUMNS,
        num_warps=1,
    )
    kernel(
        (num_sequences, places.num_v_heads, triton.cdiv(places.v_dim, _COLUMNS)),
        x_TX,
        stride,
        channels_TC,
        layer.decay_N,
        layer.bias_N,
        layer.decay_N if layer.skip_N is None else layer.skip_N,
        layer.states_RNKH,
        *saves,
        out_TX,
        places.least_time,
        places.longest_time,
    )
    return out_TX


@triton.jit
def _channels_of(
    head,
    G: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the channels of one of the 2 G + N heads, padded to BLOCK, and which of them exist."""
    index = tl.arange(0, BLOCK)
    is_value = head >= 2 * G
    first = tl.where(head < G, QUERIES + head * K, KEYS + (head - G) * K)
    first = tl.where(is_value, VALUES + (head - 2 * G) * H, first)
    return first + index, index < tl.where(is_value, H, K)


@triton.jit
def _input(
    x_ptr, stride, conv_states_ptr, first, read_row, token, channel, is_channel, C: tl.constexpr, W: tl.constexpr
):
    """Return the convolution's inputs of a sequence's token, which may be one of the W - 1 before its first one."""
    row = (first + token).to(tl.int64)
    is_own = tl.full(channel.shape, 0, tl.int32) + token >= 0
    is_kept = tl.full(channel.shape, 0, tl.int32) + tl.where(read_row >= 0, token, 0) < 0
    own = tl.load(x_ptr + row * stride + channel, mask=is_channel & is_own, other=0.0)
    kept_ptr = conv_states_ptr + (read_row.to(tl.int64) * C + channel) * (W - 1) + (W - 1 + token)
    kept = tl.load(kept_ptr, mask=is_channel & is_kept, other=0.0)
    return tl.where(is_own, own, kept)


@triton.jit
def _prepare(
    x_ptr,
    stride,
    taps_ptr,
    bias_ptr,
    conv_states_ptr,
    sequences_ptr,
    tiles_ptr,
    channels_ptr,
    G: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program computes the channels of one head, of the tokens of a tile."""
    tile, head = tl.program_id(0), tl.program_id(1)
    sequence_ptr = sequences_ptr + tl.load(tiles_ptr + tile * 2) * 4
    begin = tl.load(tiles_ptr + tile * 2 + 1)
    first, count = tl.load(sequence_ptr), tl.load(sequence_ptr + 1)
    read_row = tl.load(sequence_ptr + 2)
    channel, is_channel = _channels_of(head, G, K, H, QUERIES, KEYS, VALUES, BLOCK)
    for token in range(begin, tl.minimum(begin + TILE, count)):
        y = tl.zeros((BLOCK,), tl.float32)
        if HAS_BIAS:
            y += tl.load(bias_ptr + channel, mask=is_channel, other=0.0).to(tl.float32)
        for tap in tl.static_range(W):
            x = _input(
                x_ptr, stride, conv_states_ptr, first, read_row, token - (W - 1) + tap, channel, is_channel, C, W
            )
            weight = tl.load(taps_ptr + channel * W + tap, mask=is_channel, other=0.0)
            y += x.to(tl.float32) * weight.to(tl.float32)
        y = y / (1.0 + tl.exp(-y))
        if HAS_NORMS:
            norm = tl.sqrt(tl.sum(tl.where(is_channel, y * y, 0.0), axis=0) + 1e-6)
            scale = 1.0 / norm
            scale = tl.where(head < G, scale * (1.0 / tl.sqrt(K * 1.0)), scale)
            y *= tl.where(head < 2 * G, scale, 1.0)
        tl.store(channels_ptr + (first + token).to(tl.int64) * C + channel, y, mask=is_channel)


@triton.jit
def _keep_inputs(
    x_ptr,
    stride,
    conv_states_ptr,
    sequences_ptr,
    save_starts_ptr,
    saves_ptr,
    G: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program writes the channels of one head, in all rows that a sequence writes.

    It writes the row that it reads from last, which may be that of a save, and each tap after all of that row's later
    ones have been read.
    """
    sequence, head = tl.program_id(0), tl.program_id(1)
    sequence_ptr = sequences_ptr + sequence * 4
    first, count = tl.load(sequence_ptr), tl.load(sequence_ptr + 1)
    read_row, write_row = tl.load(sequence_ptr + 2), tl.load(sequence_ptr + 3)
    save, last_save = tl.load(save_starts_ptr + sequence), tl.load(save_starts_ptr + sequence + 1)
    if count > 0:
        channel, is_channel = _channels_of(head, G, K, H, QUERIES, KEYS, VALUES, BLOCK)
        for writes_read_row in tl.static_range(2):
            for entry in range(save, last_save + 1):
                is_save = entry < last_save
                num_tokens = tl.load(saves_ptr + entry * 2, mask=is_save, other=0)
                row = tl.load(saves_ptr + entry * 2 + 1, mask=is_save, other=0)
                num_tokens, row = tl.where(is_save, num_tokens, count), tl.where(is_save, row, write_row)
                if (row == read_row) == (writes_read_row == 1):
                    kept_ptr = conv_states_ptr + (row.to(tl.int64) * C + channel) * (W - 1)
                    for tap in tl.static_range(W - 1):
                        token = num_tokens - (W - 1) + tap
                        x = _input(x_ptr, stride, conv_states_ptr, first, read_row, token, channel, is_channel, C, W)
                        tl.store(kept_ptr + tap, x, mask=is_channel)


@triton.jit
def _softplus(x):
    """Return log(1 + e^x), precise even where it is small: log(1 + y) is 2 artanh(y / (y + 2)), and y is at most 1."""
    y = tl.exp(-tl.abs(x))
    s = y / (y + 2.0)
    square = s * s
    total = square * (1.0 / 15.0) + 1.0 / 13.0
    total = total * square + 1.0 / 11.0
    total = total * square + 1.0 / 9.0
    total = total * square + 1.0 / 7.0
    total = total * square + 1.0 / 5.0
    total = total * square + 1.0 / 3.0
    total = total * square * s + s
    return 2.0 * total + tl.where(x > 0.0, x, tl.where(x == x, 0.0, x))


@triton.jit
def _recur(
    x_ptr,
    stride,
    channels_ptr,
    decay_ptr,
    bias_ptr,
    skip_ptr,
    states_ptr,
    sequences_ptr,
    save_starts_ptr,
    saves_ptr,
    out_ptr,
    least_time,
    longest_time,
    G: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    C: tl.constexpr,
    TIMES: tl.constexpr,
    BETAS: tl.constexpr,
    IS_DELTA: tl.constexpr,
    LARGEST_SHARE: tl.constexpr,
    PADDED_K: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program computes some columns of one head of a sequence."""
    sequence, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence_ptr = sequences_ptr + sequence * 4
    first, count = tl.load(sequence_ptr), tl.load(sequence_ptr + 1)
    read_row, write_row = tl.load(sequence_ptr + 2), tl.load(sequence_ptr + 3)
    save, last_save = tl.load(save_starts_ptr + sequence), tl.load(save_starts_ptr + sequence + 1)
    key_K, column_H = tl.arange(0, PADDED_K), part * COLUMNS + tl.arange(0, COLUMNS)
    is_key_K, is_column_H = key_K < K, column_H < H
    is_state_KH = is_key_K[:, None] & is_column_H[None, :]
    place_KH = head * (K * H) + key_K[:, None] * H + column_H[None, :]
    row_size: tl.constexpr = N * K * H
    read_ptr = states_ptr + read_row.to(tl.int64) * row_size
    is_kept_K = key_K < tl.where(read_row >= 0, K, 0)
    state_KH = tl.load(read_ptr + place_KH, mask=is_kept_K[:, None] & is_column_H[None, :], other=0.0)
    group = head // (N // G)
    rate = -tl.exp(tl.load(decay_ptr + head))
    bias = tl.load(bias_ptr + head)
    next_save = tl.load(saves_ptr + save * 2, mask=save < last_save, other=0)
    for token in range(count):
        row = (first + token).to(tl.int64)
        own_ptr = channels_ptr + row * C
        q_K = tl.load(own_ptr + QUERIES + group * K + key_K, mask=is_key_K, other=0.0)
        k_K = tl.load(own_ptr + KEYS + group * K + key_K, mask=is_key_K, other=0.0)
        v_H = tl.load(own_ptr + VALUES + head * H + column_H, mask=is_column_H, other=0.0)
        time = _softplus(tl.load(x_ptr + row * stride + TIMES + head).to(tl.float32) + bias)
        if IS_DELTA:
            beta = LARGEST_SHARE / (1.0 + tl.exp(-tl.load(x_ptr + row * stride + BETAS + head).to(tl.float32)))
        else:
            time = tl.where(time < least_time, least_time, time)
            time = tl.where(time > longest_time, longest_time, time)
            beta = time
        state_KH *= tl.exp(rate * time)
        change_H = v_H
        if IS_DELTA:
            change_H -= tl.sum(state_KH * k_K[:, None], axis=0)
        state_KH += k_K[:, None] * (change_H * beta)[None, :]
        out_H = tl.sum(state_KH * q_K[:, None], axis=0)
        if not IS_DELTA:
            out_H += v_H * tl.load(skip_ptr + head)
        out_H = out_H.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * (N * H) + head * H + column_H, out_H, mask=is_column_H)
        if token + 1 == next_save:
            saved_ptr = states_ptr + tl.load(saves_ptr + save * 2 + 1).to(tl.int64) * row_size
            tl.store(saved_ptr + place_KH, state_KH, mask=is_state_KH)
            save += 1
            next_save = tl.load(saves_ptr + save * 2, mask=save < last_save, other=0)
    if count > 0:
        tl.store(states_ptr + write_row.to(tl.int64) * row_size + place_KH, state_KH, mask=is_state_KH)
