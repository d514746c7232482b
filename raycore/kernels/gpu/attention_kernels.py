"""The Triton kernels of attention over a paged KV cache. `attention` launches them.

The layout of a layer's cache is [blocks, 2, K, block size, H], which `KVTensors` defines.

Keys are visited in *tiles* of adjacent keys, which begin at fixed positions. Softmax is computed online: a query has
the highest score so far, the total of its weights, and the weighted sum of the values, which is divided by the total at
the end. A weight is 2 to the power of its score minus the highest score: scores have been multiplied by log2(e). Sinks
only add to the total, at the end. Matrix products take operands in the model's dtype and add in float32. All other
arithmetic is in float32. A cache in fp8 stores keys and values rounded, without scales; a token's own key is rounded,
too, before it is used.

Of every `OWNERS` blocks of a sequence's tokens, the cache has the one with the index `OWNER`, in one block of the
table: `raycore.attention.context_share` says why. Then keys and tiles are counted among those that the cache has, and
results are *parts* of attention to all keys, if there is a tensor for `logs`, the logarithms of the sums of their
weights.

Shape suffixes: K key-value heads, G query heads that share a key-value head, H elements of a head, C pairs of them, R
rows of a program, L keys of a tile. R and H are padded to powers of two. Offsets into the cache and into rows are
64-bit integers: a layer's cache may have more than 2^31 elements.
"""

from __future__ import annotations

# Triton is untyped:
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUntypedFunctionDecorator=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl

from raycore.kernels.gpu.fp8 import to_fp8

_MIN_SPLIT_TILES = tl.constexpr(2)
"""A single tile is read faster than its result is combined with others."""
_LOWEST_SCORE = tl.constexpr(-3.0e38)
"""The highest score before the first key. It is finite: after a tile without visible keys, the difference to the
highest score is 0, not NaN."""

_LOG2_OF_E = tl.constexpr(1.4426950408889634)

_ARGUMENTS_OF_ANY_ALIGNMENT = ["slots", "positions"]
"""They may be slices that begin at any row. Kernels aren't compiled anew for those that happen to be aligned."""


@triton.jit(do_not_specialize_on_alignment=_ARGUMENTS_OF_ANY_ALIGNMENT)
def write_cache(
    qkv,
    qkv_stride,
    blocks,
    tables,
    table_stride,
    slots,
    positions,
    norm,
    turns,
    norm_eps,
    HAS_NORM: tl.constexpr,
    NORM_OFFSET: tl.constexpr,
    TURNS_ARE_OF_ROWS: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    PADDED_H: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    OWNERS: tl.constexpr,
    OWNER: tl.constexpr,
):
    """A program serves one token's key-value head, and the query heads that share it."""
    row = (tl.program_id(0) // K).to(tl.int64)
    head = tl.program_id(0) % K
    slot = tl.load(slots + row)
    if slot < 0:
        return
    position = tl.load(positions + row).to(tl.int64)
    qkv += row * qkv_stride
    turns += (row if TURNS_ARE_OF_ROWS else position) * H
    q_RH = _load_heads(qkv, head * G, G, GROUP_ROWS, H, PADDED_H)
    q_RH = _turned(q_RH, norm, head * G, turns, norm_eps, HAS_NORM, NORM_OFFSET, G, GROUP_ROWS, H, PADDED_H)
    key_1H = _load_heads(qkv, K * G + head, 1, 1, H, PADDED_H)
    key_1H = _turned(key_1H, norm, K * G + head, turns, norm_eps, HAS_NORM, NORM_OFFSET, 1, 1, H, PADDED_H)
    value_1H = _load_heads(qkv, K * G + K + head, 1, 1, H, PADDED_H)
    # Several threads may have read the same element. All of them must have, before one of them overwrites it.
    tl.debug_barrier()
    _store_heads(qkv, head * G, q_RH, G, GROUP_ROWS, H, PADDED_H)
    _store_heads(qkv, K * G + head, key_1H, 1, 1, H, PADDED_H)
    table = tables + slot.to(tl.int64) * table_stride
    key_1H, value_1H = _as_stored(key_1H, blocks), _as_stored(value_1H, blocks)
    if OWNERS > 1:
        if position // BLOCK_SIZE % OWNERS != OWNER:
            return
        position = _num_owned(position, BLOCK_SIZE, OWNERS, OWNER)
    _store_token(blocks, table, position, head, key_1H, value_1H, K, H, PADDED_H, BLOCK_SIZE)


@triton.jit(do_not_specialize_on_alignment=_ARGUMENTS_OF_ANY_ALIGNMENT)
def attend_tokens(
    qkv,
    qkv_stride,
    blocks,
    tables,
    table_stride,
    slots,
    positions,
    norm,
    turns,
    norm_eps,
    split_sums,
    split_tops,
    split_totals,
    splits_done,
    out,
    out_stride,
    logs,
    sinks,
    scale,
    cap_scale,
    HAS_NORM: tl.constexpr,
    NORM_OFFSET: tl.constexpr,
    TURNS_ARE_OF_ROWS: tl.constexpr,
    IS_FUSED: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_CAPPED: tl.constexpr,
    IS_PART: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    PADDED_H: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    OWNERS: tl.constexpr,
    OWNER: tl.constexpr,
):
    """A program attends to one split of the keys of one row and key-value head. The last to finish adds the splits up.

    A split is adjacent tiles. A row's splits depend on its position and on the largest number of splits, not on other
    rows. Rows with few keys have fewer splits, and the other programs have nothing to do.
    """
    head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + row)
    out += row * out_stride
    if slot < 0:
        if split == 0:
            _store_heads(out, head * G, tl.zeros([ROWS, PADDED_H], tl.float32), G, ROWS, H, PADDED_H)
        return

    position = tl.load(positions + row).to(tl.int32)
    end_key = _num_owned(position + 1, BLOCK_SIZE, OWNERS, OWNER)
    first_key = 0
    if WINDOW > 0:
        first_key = _num_owned(tl.maximum(position - WINDOW + 1, 0), BLOCK_SIZE, OWNERS, OWNER)
    first_tile = first_key // TILE
    # one at least, which writes the result of a row without keys
    end_tile = tl.maximum(tl.cdiv(end_key, TILE), first_tile + 1)
    split_tiles = tl.maximum(tl.cdiv(end_tile - first_tile, tl.num_programs(1)), _MIN_SPLIT_TILES)
    num_splits = tl.cdiv(end_tile - first_tile, split_tiles)
    if split >= num_splits:
        return
    first_tile += split * split_tiles
    end_tile = tl.minimum(first_tile + split_tiles, end_tile)

    qkv += row * qkv_stride
    table = tables + slot.to(tl.int64) * table_stride
    q_RH = _load_heads(qkv, head * G, G, ROWS, H, PADDED_H)
    top_R = tl.full([ROWS], _LOWEST_SCORE, tl.float32)
    total_R = tl.zeros([ROWS], tl.float32)
    sum_RH = tl.zeros([ROWS, PADDED_H], tl.float32)
    if IS_FUSED:
        turns += (row if TURNS_ARE_OF_ROWS else position.to(tl.int64)) * H
        q_RH = _turned(q_RH, norm, head * G, turns, norm_eps, HAS_NORM, NORM_OFFSET, G, ROWS, H, PADDED_H)
        # The row's own key is the last one. It isn't read back from the cache, where it may not have arrived yet.
        end_key = position
        if split == num_splits - 1:
            key_1H = _load_heads(qkv, K * G + head, 1, 1, H, PADDED_H)
            key_1H = _turned(key_1H, norm, K * G + head, turns, norm_eps, HAS_NORM, NORM_OFFSET, 1, 1, H, PADDED_H)
            value_1H = _load_heads(qkv, K * G + K + head, 1, 1, H, PADDED_H)
            key_1H, value_1H = _as_stored(key_1H, blocks), _as_stored(value_1H, blocks)
            _store_token(blocks, table, position, head, key_1H, value_1H, K, H, PADDED_H, BLOCK_SIZE)
            score_R = tl.sum(q_RH.to(tl.float32) * key_1H.to(tl.float32), 1)
            if IS_CAPPED:
                score_R = _tanh(score_R * cap_scale)
            top_R = score_R * scale
            total_R += 1.0
            sum_RH += value_1H.to(tl.float32)

    none_R = tl.zeros([ROWS], tl.int32)
    for tile in range(first_tile, end_tile):
        top_R, total_R, sum_RH = _add_tile(
            top_R, total_R, sum_RH, q_RH, none_R + first_key, none_R + end_key, tile, first_key, end_key, blocks, table,
            head, scale, cap_scale, True, WINDOW, IS_CAPPED, TILE, K, H, PADDED_H, BLOCK_SIZE,
        )  # fmt: skip
    row_R = tl.arange(0, ROWS)
    logs += row * K * G + head * G
    if num_splits == 1:
        if IS_PART:
            total_R = _with_log(logs + row_R, total_R, top_R, row_R < G)
        out_RH = _averaged(sum_RH, total_R, top_R, sinks, head * G + row_R, row_R < G, HAS_SINKS)
        _store_heads(out, head * G, out_RH, G, ROWS, H, PADDED_H)
        return

    offsets = (row * K + head) * tl.num_programs(1) * G
    tl.store(split_tops + offsets + split * G + row_R, top_R, mask=row_R < G)
    tl.store(split_totals + offsets + split * G + row_R, total_R, mask=row_R < G)
    _store_heads(split_sums, offsets + split * G, sum_RH, G, ROWS, H, PADDED_H)
    # Behind the barrier, the stores of all threads come before the addition, which one thread does. It releases them to
    # the program that reads its result, and acquires those of the programs before. So the program that finds all
    # others done sees their stores. It reads them from the second-level cache, which all multiprocessors share.
    tl.debug_barrier()
    num_done = tl.atomic_add(splits_done + row * K + head, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    if num_done == num_splits - 1:
        tl.store(splits_done + row * K + head, 0)
        # In the order of the splits, whichever came last, so that results are reproducible.
        top_R = tl.full([ROWS], _LOWEST_SCORE, tl.float32)
        total_R = tl.zeros([ROWS], tl.float32)
        sum_RH = tl.zeros([ROWS, PADDED_H], tl.float32)
        h_H = tl.arange(0, PADDED_H)
        is_read_RH = (row_R < G)[:, None] & (h_H < H)[None, :]
        for other in tl.range(0, num_splits, loop_unroll_factor=4):
            offset_R = offsets + other * G + row_R
            other_top_R = tl.load(split_tops + offset_R, mask=row_R < G, other=0.0, cache_modifier=".cg")
            other_total_R = tl.load(split_totals + offset_R, mask=row_R < G, other=1.0, cache_modifier=".cg")
            offset_RH = offset_R[:, None] * H + h_H[None, :]
            other_sum_RH = tl.load(split_sums + offset_RH, mask=is_read_RH, other=0.0, cache_modifier=".cg")
            new_top_R = tl.maximum(top_R, other_top_R)
            kept_R = tl.exp2(top_R - new_top_R)
            added_R = tl.exp2(other_top_R - new_top_R)
            total_R = total_R * kept_R + other_total_R * added_R
            sum_RH = sum_RH * kept_R[:, None] + other_sum_RH * added_R[:, None]
            top_R = new_top_R
        if IS_PART:
            total_R = _with_log(logs + row_R, total_R, top_R, row_R < G)
        out_RH = _averaged(sum_RH, total_R, top_R, sinks, head * G + row_R, row_R < G, HAS_SINKS)
        _store_heads(out, head * G, out_RH, G, ROWS, H, PADDED_H)


@triton.jit
def attend_chunks(
    qkv,
    qkv_stride,
    blocks,
    tables,
    table_stride,
    tiles,
    ends,
    out,
    out_stride,
    logs,
    sinks,
    scale,
    cap_scale,
    HAS_ENDS: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_CAPPED: tl.constexpr,
    IS_PART: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    PADDED_H: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    OWNERS: tl.constexpr,
    OWNER: tl.constexpr,
):
    """A program serves the queries of a tile's tokens that share a key-value head: row i is query i % G of token i / G.

    The queries of a group are in one program, rather than those of one head and more tokens: short chunks fill more of
    its rows, and fewer of a tile's keys are visible to only some of its tokens.
    """
    head = tl.program_id(0)
    tiles += tl.program_id(1) * 4
    slot = tl.load(tiles).to(tl.int64)
    first_row = tl.load(tiles + 1).to(tl.int64)
    count = tl.load(tiles + 2)
    start = tl.load(tiles + 3)
    if count == 0:
        return
    token_R = tl.arange(0, ROWS) // G
    query_R = head * G + tl.arange(0, ROWS) % G
    h_H = tl.arange(0, PADDED_H)
    is_row_RH = (token_R < count)[:, None] & (h_H < H)[None, :]
    offset_RH = query_R[:, None] * H + h_H[None, :]
    q_RH = tl.load(qkv + ((first_row + token_R) * qkv_stride)[:, None] + offset_RH, mask=is_row_RH, other=0.0)

    table = tables + slot * table_stride
    end_R = start + token_R + 1
    end_key = start + count
    if HAS_ENDS:
        end_R = tl.load(ends + first_row + token_R, mask=token_R < count, other=0)
        end_key = tl.max(end_R, 0)
    end_R = _num_owned(end_R, BLOCK_SIZE, OWNERS, OWNER)
    end_key = _num_owned(end_key, BLOCK_SIZE, OWNERS, OWNER)
    first_R = tl.zeros([ROWS], tl.int32)
    first_key = 0
    # The first token sees all keys of the tiles before this one, and so do the others. With a window, too few tiles are
    # seen by all.
    end_seen_by_all = _num_owned(start + 1, BLOCK_SIZE, OWNERS, OWNER) // TILE
    if WINDOW > 0:
        first_R = _num_owned(tl.maximum(start + token_R - WINDOW + 1, 0), BLOCK_SIZE, OWNERS, OWNER)
        first_key = _num_owned(tl.maximum(start - WINDOW + 1, 0), BLOCK_SIZE, OWNERS, OWNER)
        end_seen_by_all = first_key // TILE
    top_R = tl.full([ROWS], _LOWEST_SCORE, tl.float32)
    total_R = tl.zeros([ROWS], tl.float32)
    sum_RH = tl.zeros([ROWS, PADDED_H], tl.float32)
    if WINDOW == 0:
        for tile in range(end_seen_by_all):
            top_R, total_R, sum_RH = _add_tile(
                top_R, total_R, sum_RH, q_RH, first_R, end_R, tile, first_key, end_key, blocks, table, head, scale,
                cap_scale, False, WINDOW, IS_CAPPED, TILE, K, H, PADDED_H, BLOCK_SIZE,
            )  # fmt: skip
    for tile in range(end_seen_by_all, tl.cdiv(end_key, TILE)):
        top_R, total_R, sum_RH = _add_tile(
            top_R, total_R, sum_RH, q_RH, first_R, end_R, tile, first_key, end_key, blocks, table, head, scale,
            cap_scale, True, WINDOW, IS_CAPPED, TILE, K, H, PADDED_H, BLOCK_SIZE,
        )  # fmt: skip
    if IS_PART:
        total_R = _with_log(logs + (first_row + token_R) * K * G + query_R, total_R, top_R, token_R < count)
    out_RH = _averaged(sum_RH, total_R, top_R, sinks, query_R, token_R < count, HAS_SINKS)
    out_offset_RH = ((first_row + token_R) * out_stride)[:, None] + offset_RH
    tl.store(out + out_offset_RH, out_RH.to(out.dtype.element_ty), mask=is_row_RH)


@triton.jit
def _add_tile(
    top_R,
    total_R,
    sum_RH,
    q_RH,
    first_R,
    end_R,
    tile,
    first_key,
    end_key,
    blocks,
    table,
    head,
    scale,
    cap_scale,
    IS_MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_CAPPED: tl.constexpr,
    TILE: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    PADDED_H: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Returns `top_R`, `total_R` and `sum_RH` with the keys and values of a tile added.

    Rows see the keys before `end_R`, with a window from `first_R` on. Only keys from `first_key` to `end_key` are read.
    With `IS_MASKED` false, all rows see all keys of the tile.
    """
    key_L = tile * TILE + tl.arange(0, TILE)
    is_read_L = key_L < end_key
    if WINDOW > 0:
        is_read_L &= key_L >= first_key
    if IS_MASKED:
        block_L = tl.load(table + key_L // BLOCK_SIZE, mask=is_read_L, other=0).to(tl.int64)
    else:
        block_L = tl.load(table + key_L // BLOCK_SIZE).to(tl.int64)
    offset_L = (block_L * 2 * K + head) * BLOCK_SIZE + key_L % BLOCK_SIZE
    keys_LH = _load_tile(blocks, offset_L, is_read_L, IS_MASKED, H, PADDED_H).to(q_RH.dtype)
    values_LH = _load_tile(blocks, offset_L + K * BLOCK_SIZE, is_read_L, IS_MASKED, H, PADDED_H).to(q_RH.dtype)

    # "ieee": float32 isn't rounded to TF32. Has no effect on other dtypes.
    score_RL = tl.dot(q_RH, tl.trans(keys_LH), input_precision="ieee")
    if IS_CAPPED:
        score_RL = _tanh(score_RL * cap_scale)
    if IS_MASKED:
        is_seen_RL = is_read_L[None, :] & (key_L[None, :] < end_R[:, None])
        if WINDOW > 0:
            is_seen_RL &= key_L[None, :] >= first_R[:, None]
        score_RL = tl.where(is_seen_RL, score_RL, float("-inf"))
    new_top_R = tl.maximum(top_R, tl.max(score_RL, 1) * scale)
    weight_RL = tl.exp2(score_RL * scale - new_top_R[:, None])
    kept_R = tl.exp2(top_R - new_top_R)
    total_R = total_R * kept_R + tl.sum(weight_RL, 1)
    sum_RH = tl.dot(weight_RL.to(values_LH.dtype), values_LH, sum_RH * kept_R[:, None], input_precision="ieee")
    return new_top_R, total_R, sum_RH


@triton.jit
def _num_owned(count, BLOCK_SIZE: tl.constexpr, OWNERS: tl.constexpr, OWNER: tl.constexpr):
    """Returns how many of a sequence's first `count` tokens the cache has, as `ContextShare.num_owned`."""
    if OWNERS > 1:
        rest = count % (BLOCK_SIZE * OWNERS) - OWNER * BLOCK_SIZE
        count = count // (BLOCK_SIZE * OWNERS) * BLOCK_SIZE + tl.minimum(tl.maximum(rest, 0), BLOCK_SIZE)
    return count


@triton.jit
def _with_log(logs, total_R, top_R, is_query_R):
    """Stores the logarithms of the sums of weights, which aren't relative to the highest score, at `logs`.

    Returns the sums to divide by. A row that sees no key has a logarithm of minus infinity, and a result of zeros.
    """
    has_keys_R = total_R > 0
    total_R = tl.where(has_keys_R, total_R, 1.0)
    log_R = (tl.log2(total_R) + top_R) / _LOG2_OF_E
    tl.store(logs, tl.where(has_keys_R, log_R, float("-inf")), mask=is_query_R)
    return total_R


@triton.jit
def _tanh(x):
    """Returns the hyperbolic tangent, off by about 1e-7."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def _averaged(sum_RH, total_R, top_R, sinks, query_R, is_query_R, HAS_SINKS: tl.constexpr):
    """Returns the weighted sums divided by their weights and those of the sinks of the rows' query heads."""
    if HAS_SINKS:
        sink_R = tl.load(sinks + query_R, mask=is_query_R, other=0.0).to(tl.float32)
        total_R += tl.exp2(sink_R * _LOG2_OF_E - top_R)
    return sum_RH / total_R[:, None]


@triton.jit
def _load_tile(blocks, offset_L, is_read_L, IS_MASKED: tl.constexpr, H: tl.constexpr, PADDED_H: tl.constexpr):
    """Returns cached keys or values, [L, PADDED_H]. `offset_L`: which head of which token of the layer's cache each is.

    What isn't read, or is beyond H, is zeros.
    """
    h_H = tl.arange(0, PADDED_H)
    offset_LH = offset_L[:, None] * H + h_H[None, :]
    is_read_LH = (h_H < H)[None, :]
    if IS_MASKED:
        is_read_LH = is_read_LH & is_read_L[:, None]
    if IS_MASKED or H != PADDED_H:
        x_LH = tl.load(blocks + offset_LH, mask=is_read_LH, other=0.0)
    else:
        x_LH = tl.load(blocks + offset_LH)
    return x_LH


@triton.jit
def _as_stored(x, blocks):
    """Returns `x` in the cache's dtype."""
    if blocks.dtype.element_ty == tl.float8e4nv:
        x = to_fp8(x.to(tl.float32))
    return x.to(blocks.dtype.element_ty)


@triton.jit
def _store_token(
    blocks,
    table,
    position,
    head,
    key_1H,
    value_1H,
    K: tl.constexpr,
    H: tl.constexpr,
    PADDED_H: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Stores one head's key and value, in the cache's dtype, of the token at `position`."""
    block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
    offset = (block * 2 * K + head) * BLOCK_SIZE + position % BLOCK_SIZE
    _store_heads(blocks, offset, key_1H, 1, 1, H, PADDED_H)
    _store_heads(blocks, offset + K * BLOCK_SIZE, value_1H, 1, 1, H, PADDED_H)


@triton.jit
def _load_heads(heads, first_head, COUNT: tl.constexpr, ROWS: tl.constexpr, H: tl.constexpr, PADDED_H: tl.constexpr):
    """Returns `COUNT` adjacent heads as [ROWS, PADDED_H], padded with zeros."""
    row_R, h_H = tl.arange(0, ROWS), tl.arange(0, PADDED_H)
    offset_RH = (first_head + row_R)[:, None] * H + h_H[None, :]
    return tl.load(heads + offset_RH, mask=(row_R < COUNT)[:, None] & (h_H < H)[None, :], other=0.0)


@triton.jit
def _store_heads(
    heads, first_head, x_RH, COUNT: tl.constexpr, ROWS: tl.constexpr, H: tl.constexpr, PADDED_H: tl.constexpr
):
    """Stores the first `COUNT` rows of [ROWS, PADDED_H] as adjacent heads."""
    row_R, h_H = tl.arange(0, ROWS), tl.arange(0, PADDED_H)
    offset_RH = (first_head + row_R)[:, None] * H + h_H[None, :]
    is_stored_RH = (row_R < COUNT)[:, None] & (h_H < H)[None, :]
    tl.store(heads + offset_RH, x_RH.to(heads.dtype.element_ty), mask=is_stored_RH)


@triton.jit
def _turned(
    x_RH,
    norm,
    first_head,
    turns,
    norm_eps,
    HAS_NORM: tl.constexpr,
    NORM_OFFSET: tl.constexpr,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    H: tl.constexpr,
    PADDED_H: tl.constexpr,
):
    """Returns heads normalized and rotated, in their dtype. `turns`: the cosine and sine of each pair's angle."""
    wide_RH = x_RH.to(tl.float32)
    if HAS_NORM:
        mean_R = tl.sum(wide_RH * wide_RH, 1) / H
        weight_RH = _load_heads(norm, first_head, COUNT, ROWS, H, PADDED_H).to(tl.float32)
        if NORM_OFFSET != 0.0:
            weight_RH += NORM_OFFSET
        wide_RH = wide_RH * tl.rsqrt(mean_R + norm_eps)[:, None] * weight_RH
    h_H = tl.arange(0, PADDED_H)
    turns_H = tl.load(turns + h_H, mask=h_H < H, other=0.0)
    cosine_C, sine_C = tl.split(tl.reshape(turns_H, [PADDED_H // 2, 2]))
    even_RC, odd_RC = tl.split(tl.reshape(wide_RH, [ROWS, PADDED_H // 2, 2]))
    new_even_RC = even_RC * cosine_C[None, :] - odd_RC * sine_C[None, :]
    new_odd_RC = odd_RC * cosine_C[None, :] + even_RC * sine_C[None, :]
    return tl.interleave(new_even_RC, new_odd_RC).to(x_RH.dtype)
