"""The Triton kernels of latent attention over a paged cache. `latent_attention` launches them.

The layout of a layer's cache is [blocks, block size, W], which `LatentTensors` defines: a token's latent, which is its
key and its value, and then a rotated part of its key.

Keys are visited in tiles, and softmax is computed online, as in `attention_kernels`. All query heads of a token share
the keys, so a program has the heads of one token or of several.

Shape suffixes: N query heads, W elements of a query or of a key, R those of a latent, P the rotated ones, C pairs of
them, Q rows of a program, L keys of a tile. R, P, Q are padded to powers of two. Offsets into the cache and into rows
are 64-bit integers.
"""

from __future__ import annotations

# Triton is untyped:
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUntypedFunctionDecorator=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl

_LOWEST_SCORE = tl.constexpr(-3.0e38)
"""The highest score before the first key. It is finite: after a tile without visible keys, the difference to the
highest score is 0, not NaN."""
_MIN_SPLIT_TILES = tl.constexpr(2)
"""A single tile is read faster than its result is combined with others."""
_ARGUMENTS_OF_ANY_ALIGNMENT = ["slots", "positions"]
"""They may be slices that begin at any row. Kernels aren't compiled anew for those that happen to be aligned."""


@triton.jit(do_not_specialize_on_alignment=_ARGUMENTS_OF_ANY_ALIGNMENT)
def prepare_latents(
    fused,
    fused_stride,
    rows,
    tables,
    table_stride,
    slots,
    positions,
    norm,
    turns,
    norm_eps,
    N: tl.constexpr,
    R: tl.constexpr,
    PADDED_R: tl.constexpr,
    P: tl.constexpr,
    PADDED_P: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """A program serves one token: normalizes its latent, rotates its queries and its key, and stores the latter.

    Queries are rotated in place, `HEADS` heads at a time. The key is only stored.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    position = tl.load(positions + row).to(tl.int64)
    fused += row * fused_stride
    turns += position * P
    p_P = tl.arange(0, PADDED_P)
    turns_P = tl.load(turns + p_P, mask=p_P < P, other=0.0)
    block = tl.load(tables + slot.to(tl.int64) * table_stride + position // BLOCK_SIZE).to(tl.int64)
    place = rows + (block * BLOCK_SIZE + position % BLOCK_SIZE) * (R + P)

    r_R = tl.arange(0, PADDED_R)
    key = fused + N * (R + P)
    latent_R = tl.load(key + r_R, mask=r_R < R, other=0.0).to(tl.float32)
    weight_R = tl.load(norm + r_R, mask=r_R < R, other=0.0).to(tl.float32)
    latent_R = latent_R * tl.rsqrt(tl.sum(latent_R * latent_R, 0) / R + norm_eps) * weight_R
    tl.store(place + r_R, latent_R.to(rows.dtype.element_ty), mask=r_R < R)
    rotated_1P = _rotated(tl.load(key + R + p_P, mask=p_P < P, other=0.0)[None, :], turns_P, 1, PADDED_P)
    tl.store(place + R + p_P[None, :], rotated_1P, mask=(p_P < P)[None, :])

    for first in range(0, N, HEADS):
        head_Q = first + tl.arange(0, HEADS)
        offset_QP = head_Q[:, None] * (R + P) + R + p_P[None, :]
        is_query_QP = (head_Q < N)[:, None] & (p_P < P)[None, :]
        q_QP = _rotated(tl.load(fused + offset_QP, mask=is_query_QP, other=0.0), turns_P, HEADS, PADDED_P)
        # Several threads may have read the same element. All of them must have, before one of them overwrites it.
        tl.debug_barrier()
        tl.store(fused + offset_QP, q_QP, mask=is_query_QP)


@triton.jit
def _rotated(x_QP, turns_P, ROWS: tl.constexpr, PADDED_P: tl.constexpr):
    """Returns rows of pairs, rotated, in their dtype. `turns_P`: the cosine and sine of each pair's angle."""
    cosine_C, sine_C = tl.split(tl.reshape(turns_P, [PADDED_P // 2, 2]))
    even_QC, odd_QC = tl.split(tl.reshape(x_QP.to(tl.float32), [ROWS, PADDED_P // 2, 2]))
    new_even_QC = even_QC * cosine_C[None, :] - odd_QC * sine_C[None, :]
    new_odd_QC = odd_QC * cosine_C[None, :] + even_QC * sine_C[None, :]
    return tl.interleave(new_even_QC, new_odd_QC).to(x_QP.dtype)


@triton.jit(do_not_specialize_on_alignment=_ARGUMENTS_OF_ANY_ALIGNMENT)
def attend_tokens(
    fused,
    fused_stride,
    rows,
    tables,
    table_stride,
    slots,
    positions,
    split_sums,
    split_tops,
    split_totals,
    out,
    out_stride,
    scale,
    SPLITS: tl.constexpr,
    Q: tl.constexpr,
    TILE: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    PADDED_R: tl.constexpr,
    P: tl.constexpr,
    PADDED_P: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """A program has `Q` heads of one token, and one split of its keys. With several splits, `combine_splits` follows.

    A split is adjacent tiles. A token's splits depend on its position and on their number, not on other tokens.
    """
    head_Q = tl.program_id(0) * Q + tl.arange(0, Q)
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + row)
    r_R, p_P = tl.arange(0, PADDED_R), tl.arange(0, PADDED_P)
    is_out_QR = (head_Q < N)[:, None] & (r_R < R)[None, :]
    if slot < 0:
        if SPLITS == 1:
            zeros_QR = tl.zeros([Q, PADDED_R], tl.float32).to(out.dtype.element_ty)
            tl.store(out + row * out_stride + head_Q[:, None] * R + r_R[None, :], zeros_QR, mask=is_out_QR)
        return
    position = tl.load(positions + row).to(tl.int32)
    first_tile, end_tile = _tiles_of_split(position, split, SPLITS, TILE)
    query = fused + row * fused_stride + head_Q[:, None] * (R + P)
    q_QR = tl.load(query + r_R[None, :], mask=is_out_QR, other=0.0)
    q_QP = tl.load(query + R + p_P[None, :], mask=(head_Q < N)[:, None] & (p_P < P)[None, :], other=0.0)
    top_Q = tl.full([Q], _LOWEST_SCORE, tl.float32)
    total_Q = tl.zeros([Q], tl.float32)
    sum_QR = tl.zeros([Q, PADDED_R], tl.float32)
    position_Q = tl.zeros([Q], tl.int32) + position
    table = tables + slot.to(tl.int64) * table_stride
    for tile in range(first_tile, end_tile):
        top_Q, total_Q, sum_QR = _add_tile(
            top_Q, total_Q, sum_QR, q_QR, q_QP, position_Q, tile, position + 1, rows, table, scale,
            TILE, R, PADDED_R, P, PADDED_P, BLOCK_SIZE,
        )  # fmt: skip
    if SPLITS == 1:
        out_QR = (sum_QR / total_Q[:, None]).to(out.dtype.element_ty)
        tl.store(out + row * out_stride + head_Q[:, None] * R + r_R[None, :], out_QR, mask=is_out_QR)
    else:
        offset_Q = (row * N + head_Q) * SPLITS + split
        tl.store(split_tops + offset_Q, top_Q, mask=head_Q < N)
        tl.store(split_totals + offset_Q, total_Q, mask=head_Q < N)
        tl.store(split_sums + offset_Q[:, None] * R + r_R[None, :], sum_QR, mask=is_out_QR)


@triton.jit
def _tiles_of_split(position, split, SPLITS: tl.constexpr, TILE: tl.constexpr):
    """Returns the first tile of a split, and the one after its last. Of a split without keys, both are the same."""
    num_tiles = position // TILE + 1
    split_tiles = tl.maximum(tl.cdiv(num_tiles, SPLITS), _MIN_SPLIT_TILES)
    return tl.minimum(split * split_tiles, num_tiles), tl.minimum((split + 1) * split_tiles, num_tiles)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def combine_splits(
    slots,
    split_sums,
    split_tops,
    split_totals,
    out,
    out_stride,
    SPLITS: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    PADDED_R: tl.constexpr,
):
    """A program adds up the splits of one head of a token, in their order. Splits without keys add nothing."""
    row = (tl.program_id(0) // N).to(tl.int64)
    head = tl.program_id(0) % N
    r_R = tl.arange(0, PADDED_R)
    place = out + row * out_stride + head * R + r_R
    if tl.load(slots + row) < 0:
        tl.store(place, tl.zeros([PADDED_R], tl.float32).to(out.dtype.element_ty), mask=r_R < R)
        return
    first = (row * N + head) * SPLITS
    top = _LOWEST_SCORE + 0.0
    total = 0.0
    sum_R = tl.zeros([PADDED_R], tl.float32)
    for split in range(SPLITS):
        own_top = tl.load(split_tops + first + split)
        new_top = tl.maximum(top, own_top)
        kept, added = tl.exp2(top - new_top), tl.exp2(own_top - new_top)
        own_sum_R = tl.load(split_sums + (first + split) * R + r_R, mask=r_R < R, other=0.0)
        total = total * kept + tl.load(split_totals + first + split) * added
        sum_R = sum_R * kept + own_sum_R * added
        top = new_top
    tl.store(place, (sum_R / total).to(out.dtype.element_ty), mask=r_R < R)


@triton.jit
def attend_chunks(
    fused,
    fused_stride,
    rows,
    tables,
    table_stride,
    tiles,
    out,
    out_stride,
    scale,
    Q: tl.constexpr,
    TILE: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    PADDED_R: tl.constexpr,
    P: tl.constexpr,
    PADDED_P: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """A program has `Q` queries of a tile's tokens, counted token by token: query i is head i % N of token i / N."""
    tiles += tl.program_id(1) * 4
    slot = tl.load(tiles).to(tl.int64)
    first_row = tl.load(tiles + 1).to(tl.int64)
    count = tl.load(tiles + 2)
    start = tl.load(tiles + 3)
    query_Q = tl.program_id(0) * Q + tl.arange(0, Q)
    if tl.program_id(0) * Q >= count * N:
        return
    token_Q, head_Q = query_Q // N, query_Q % N
    is_query_Q = token_Q < count
    r_R, p_P = tl.arange(0, PADDED_R), tl.arange(0, PADDED_P)
    query = fused + ((first_row + token_Q) * fused_stride + head_Q * (R + P))[:, None]
    is_out_QR = is_query_Q[:, None] & (r_R < R)[None, :]
    q_QR = tl.load(query + r_R[None, :], mask=is_out_QR, other=0.0)
    q_QP = tl.load(query + R + p_P[None, :], mask=is_query_Q[:, None] & (p_P < P)[None, :], other=0.0)
    position_Q = start + token_Q
    last_token = tl.minimum((tl.program_id(0) * Q + Q - 1) // N, count - 1)
    end_key = start + last_token + 1
    top_Q = tl.full([Q], _LOWEST_SCORE, tl.float32)
    total_Q = tl.zeros([Q], tl.float32)
    sum_QR = tl.zeros([Q, PADDED_R], tl.float32)
    table = tables + slot * table_stride
    for tile in range(tl.cdiv(end_key, TILE)):
        top_Q, total_Q, sum_QR = _add_tile(
            top_Q, total_Q, sum_QR, q_QR, q_QP, position_Q, tile, end_key, rows, table, scale,
            TILE, R, PADDED_R, P, PADDED_P, BLOCK_SIZE,
        )  # fmt: skip
    out_QR = (sum_QR / total_Q[:, None]).to(out.dtype.element_ty)
    place = out + ((first_row + token_Q) * out_stride + head_Q * R)[:, None]
    tl.store(place + r_R[None, :], out_QR, mask=is_out_QR)


@triton.jit
def _add_tile(
    top_Q,
    total_Q,
    sum_QR,
    q_QR,
    q_QP,
    position_Q,
    tile,
    end_key,
    rows,
    table,
    scale,
    TILE: tl.constexpr,
    R: tl.constexpr,
    PADDED_R: tl.constexpr,
    P: tl.constexpr,
    PADDED_P: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Returns `top_Q`, `total_Q` and `sum_QR` with the keys of a tile before `end_key` added.

    Queries see the keys up to `position_Q`.
    """
    key_L = tile * TILE + tl.arange(0, TILE)
    is_read_L = key_L < end_key
    block_L = tl.load(table + key_L // BLOCK_SIZE, mask=is_read_L, other=0).to(tl.int64)
    # Two products: of one product of a sum, Triton 3.6 assumes more alignment than odd multiples of a key's size have.
    row_L1 = (rows + block_L * (BLOCK_SIZE * (R + P)) + (key_L % BLOCK_SIZE) * (R + P))[:, None]
    r_R, p_P = tl.arange(0, PADDED_R), tl.arange(0, PADDED_P)
    latents_LR = tl.load(row_L1 + r_R[None, :], mask=is_read_L[:, None] & (r_R < R)[None, :], other=0.0)
    keys_LP = tl.load(row_L1 + R + p_P[None, :], mask=is_read_L[:, None] & (p_P < P)[None, :], other=0.0)
    # "ieee": float32 isn't rounded to TF32. Has no effect on other dtypes.
    score_QL = tl.dot(q_QR, tl.trans(latents_LR), input_precision="ieee")
    score_QL = tl.dot(q_QP, tl.trans(keys_LP), score_QL, input_precision="ieee")
    is_seen_QL = is_read_L[None, :] & (key_L[None, :] <= position_Q[:, None])
    score_QL = tl.where(is_seen_QL, score_QL, float("-inf"))
    new_top_Q = tl.maximum(top_Q, tl.max(score_QL, 1) * scale)
    weight_QL = tl.exp2(score_QL * scale - new_top_Q[:, None])
    kept_Q = tl.exp2(top_Q - new_top_Q)
    total_Q = total_Q * kept_Q + tl.sum(weight_QL, 1)
    sum_QR = tl.dot(weight_QL.to(latents_LR.dtype), latents_LR, sum_QR * kept_Q[:, None], input_precision="ieee")
    return new_top_Q, total_Q, sum_QR
