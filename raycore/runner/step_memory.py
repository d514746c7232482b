"""An upper bound on the memory that a step needs in addition to weights and KV cache.

Memory that grows with the product of two limits is bounded where it is allocated (`GatherScratch`, `rows_at_a_time`),
and counted here with the same functions. Other memory grows with the number of tokens in a step. Of that, this module
counts the tensors that exist at the moment when most memory is in use. A test compares the bound with what steps
allocate.

Not included: results of requests, such as the log probabilities of a whole vocabulary for every token of a prompt.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from raycore.attention.batch_invariant import TILE, BatchInvariantAttention
from raycore.attention.context_share import ContextShare
from raycore.attention.explicit import SCORE_BYTES
from raycore.attention.gather import GatherAttention
from raycore.attention.kv_tensors import KVTensors
from raycore.attention.scratch import num_scratch_blocks
from raycore.attention.torch_partial import max_blocks as max_partial_blocks
from raycore.checkpoint.rank_rows import LatentRows
from raycore.models.latent import LatentHeads
from raycore.models.pooling import PoolingSpec
from raycore.models.spec import ModelSpec
from raycore.models.state import StateSpec
from raycore.sampling.logits import max_penalty_bytes
from raycore.sampling.sampler import rows_at_a_time
from raycore.state.native import supports
from raycore.state.torch_recurrence import CHUNK

_FLOAT32 = 4
_INT64 = 8
_LOGITS_COPIES = 8
"""Number of float32 copies of the logits that exist at once while the sampler sorts them for top-p."""
_PROCESSED_COPIES = 4
"""Number of float32 copies of all logits that exist at once around users' logits processors."""
_FIXED_BYTES = 4 << 20
"""Constants, and buffers inside torch's functions."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The size of the largest step."""

    num_tokens: int
    num_seqs: int
    max_model_len: int
    block_size: int
    num_samples_per_seq: int = 1
    """Maximum number of tokens that are sampled for a request: one more than it has drafts."""
    num_expert_engines: int = 1
    """Number of engines that share experts. Each of them processes the tokens of all these engines."""
    context_size: int = 1
    """Number of workers that have other tokens' keys and values of the same heads. Each attends to its own."""
    num_query_parts: int = 1
    """How many of these have different query heads."""
    processes_all_logits: bool = False
    """Whether users' logits processors get the logits of all requests at once."""


def step_bytes(
    spec: ModelSpec,
    limits: StepLimits,
    tp_size: int,
    dtype: torch.dtype,
    *,
    batch_invariant: bool = False,
    native: bool = False,
    native_attention: bool = False,
    windows: Collection[int | None] | None = None,
) -> int:
    """Return an upper bound on the bytes that a step needs on one of `tp_size` ranks.

    The bound should be less than three times what the largest step really needs.

    Args:
        native: whether native kernels compute layers and log probabilities.
        native_attention: whether they compute attention. They need no scratch memory.
        windows: those of the parts of attention in plain torch, each of which has masks of its own. None: there is a
            part for each window that a layer has.
    """
    own, other = _native_token_bytes(spec, tp_size, dtype), _token_bytes(spec, tp_size, dtype, batch_invariant)
    layer = limits.num_tokens * (
        (own if native and native_attention else other) + _expert_bytes(spec, limits, tp_size, dtype, native)
    )
    if spec.state is not None:
        is_native = native and supports(spec.state.k_dim, spec.state.conv_size)
        layer = max(layer, _state_bytes(spec.state, spec.hidden_size, limits, tp_size, dtype, native=is_native))
    if spec.pooling is not None:
        logits = _pooling_bytes(spec, spec.pooling, limits, dtype)
    else:
        logits = _logits_bytes(spec, limits, tp_size, dtype, row_by_row=batch_invariant or native)
    batch = limits.num_seqs * (limits.max_model_len + 1) * 4
    if limits.context_size > 1:
        layer += limits.num_tokens * _context_token_bytes(spec, limits, tp_size, dtype)
    of_attention = _attention_bytes if limits.context_size == 1 else _partial_attention_bytes
    windows = set(spec.layer_windows) if windows is None else windows
    attention = 0 if native_attention else of_attention(spec, limits, tp_size, dtype, batch_invariant, windows)
    return _FIXED_BYTES + batch + attention + max(layer, logits)


def _pooling_bytes(spec: ModelSpec, pooling: PoolingSpec, limits: StepLimits, dtype: torch.dtype) -> int:
    """Return the bytes of final hidden states, and of the results of each token of a step."""
    hidden = spec.hidden_size * (2 * dtype.itemsize + _FLOAT32)
    results = 4 * pooling.widest(spec.hidden_size) * _FLOAT32
    return limits.num_tokens * (hidden + results)


def scratch_bytes(spec: ModelSpec, limits: StepLimits, tp_size: int, dtype: torch.dtype, batch_invariant: bool) -> int:
    """Return the bytes of the scratch memory of attention in plain torch, which is kept between steps."""
    if spec.latent is not None:
        return 0
    attention = BatchInvariantAttention if batch_invariant else GatherAttention
    max_blocks = attention.max_blocks(limits.max_model_len, limits.block_size)
    if limits.context_size > 1:
        max_blocks = max_partial_blocks(limits.max_model_len, ContextShare(0, limits.context_size, limits.block_size))
    num_kv_heads = spec.kv_heads_per_rank(tp_size)
    bytes_per_block = KVTensors.bytes_per_block(1, num_kv_heads, limits.block_size, spec.head_dim, dtype)
    return num_scratch_blocks(bytes_per_block, limits.num_seqs, max_blocks) * bytes_per_block


def _attention_bytes(
    spec: ModelSpec,
    limits: StepLimits,
    tp_size: int,
    dtype: torch.dtype,
    batch_invariant: bool,
    windows: Collection[int | None],
) -> int:
    """Return the bytes for attention: scratch memory, scores, and for each of `windows` row indexes and masks."""
    if spec.latent is not None:
        return _latent_attention_bytes(spec.latent, limits, spec.num_heads // tp_size, dtype, batch_invariant)
    attention = BatchInvariantAttention if batch_invariant else GatherAttention
    num_kv_heads = spec.kv_heads_per_rank(tp_size)
    group = spec.num_heads // tp_size // num_kv_heads
    max_blocks = attention.max_blocks(limits.max_model_len, limits.block_size)
    scratch = scratch_bytes(spec, limits, tp_size, dtype, batch_invariant)
    max_keys = max_blocks * limits.block_size
    num_readers = min(limits.num_seqs, limits.num_tokens)
    if batch_invariant:
        mask_rows = limits.num_tokens + 2 * TILE * num_readers
        scores = scratch * TILE * group // (2 * spec.head_dim) + TILE * 32 * group * max_keys * dtype.itemsize
    else:
        mask_rows = max(limits.num_tokens, num_readers * num_kv_heads)
        scores = scratch * group // spec.head_dim
        if dtype != torch.float32:
            scores += scratch // 2  # on a CPU, the matrix product copies the keys
    if spec.attention_softcap is not None or spec.sinks:
        of_token = group * num_kv_heads * max_keys
        if batch_invariant:
            scores += _explicit_bytes(TILE * of_token, 0)  # one tile at a time
        else:
            num_in_decodes = group * scratch // (2 * spec.head_dim * dtype.itemsize)
            scores += _explicit_bytes(num_in_decodes, limits.num_tokens * of_token)
    # tokens that are computed together see their own keys, those of a window, and what rounding adds at both ends
    num_together = TILE if batch_invariant else limits.num_tokens
    around = num_together + 2 * attention.max_blocks(0, limits.block_size) * limits.block_size
    keys = sum(max_keys if window is None else min(max_keys, window + around) for window in windows)
    masks = mask_rows * keys * (dtype.itemsize + 1)
    gather_rows = num_readers * -(-keys // limits.block_size) * 2 * num_kv_heads * _INT64
    return scratch + scores + masks + 3 * gather_rows


def _latent_attention_bytes(
    latent: LatentHeads, limits: StepLimits, num_heads: int, dtype: torch.dtype, batch_invariant: bool
) -> int:
    """Return the bytes for latent attention: the keys of one request, scores and masks of some of its tokens.

    Args:
        num_heads: of all workers for which the worker attends to its keys.
    """
    # no worker has more than its tokens of whole rounds
    round_size = limits.block_size * limits.context_size
    max_keys = limits.max_model_len + 1
    if limits.context_size > 1:
        max_keys = -(-max_keys // round_size) * limits.block_size
    keys = max_keys * latent.width * dtype.itemsize
    if dtype != torch.float32:
        keys *= 2  # on a CPU, the matrix product copies them
    of_token = num_heads * max_keys
    num_tokens = 1 if batch_invariant else limits.num_tokens
    scores = max(of_token * _FLOAT32, min(SCORE_BYTES, num_tokens * of_token * _FLOAT32))
    mask = scores // (_FLOAT32 * num_heads)
    indexes = limits.num_seqs * (max_keys // limits.block_size + 1) * _INT64
    return keys + 3 * scores + 2 * mask + indexes


def _latent_numbers(spec: ModelSpec, latent: LatentHeads, tp_size: int, *, is_native: bool) -> int:
    """Return how many numbers a token has in latent attention, as far as they exist at the same time."""
    rows, num_heads = LatentRows.of(spec, 0, tp_size), spec.num_heads // tp_size
    first = sum(part.num for part in rows.inputs) + (0 if rows.q_b is None else 2 * rows.q_b.num)
    fused, results = (num_heads + 1) * latent.width, num_heads * latent.rank
    # in plain torch, matrix products of heads are computed beside their places
    copies = 0 if is_native else fused + results
    return first + fused + results + rows.values.num + copies


def _partial_attention_bytes(
    spec: ModelSpec,
    limits: StepLimits,
    tp_size: int,
    dtype: torch.dtype,
    batch_invariant: bool,
    windows: Collection[int | None],
) -> int:
    """Return the bytes for attention to a share of the keys: scratch memory, scores, and for each of `windows` row
    indexes."""
    num_kv_heads = spec.kv_heads_per_rank(tp_size)
    num_heads = spec.num_heads // tp_size * limits.num_query_parts
    if spec.latent is not None:
        return _latent_attention_bytes(spec.latent, limits, num_heads, dtype, batch_invariant)
    scratch = scratch_bytes(spec, limits, tp_size, dtype, batch_invariant)
    max_blocks = max_partial_blocks(limits.max_model_len, ContextShare(0, limits.context_size, limits.block_size))
    of_token = num_heads * max_blocks * limits.block_size
    if batch_invariant:
        scores = _explicit_bytes(TILE * of_token, 0)  # one tile at a time
    else:
        num_in_decodes = num_heads // num_kv_heads * scratch // (2 * spec.head_dim * dtype.itemsize)
        scores = _explicit_bytes(num_in_decodes, limits.num_tokens * of_token)
    num_units = limits.num_tokens if batch_invariant else min(limits.num_seqs, limits.num_tokens)
    gather_rows = num_units * max_blocks * 2 * num_kv_heads * _INT64
    # a CPU's matrix product copies the keys
    return 2 * scratch + scores + (len(windows) + 2) * gather_rows


def _context_token_bytes(spec: ModelSpec, limits: StepLimits, tp_size: int, dtype: torch.dtype) -> int:
    """Return the bytes that one token needs for what workers with other tokens' keys and values exchange."""
    num_heads = spec.num_heads // tp_size
    query_size, result_size = spec.head_dim, spec.head_dim
    if spec.latent is not None:
        query_size, result_size = spec.latent.width, spec.latent.rank
    queries = 2 * limits.num_query_parts * num_heads * query_size * dtype.itemsize
    parts = (2 * limits.num_query_parts + limits.context_size + 2) * num_heads * (result_size + 2) * _FLOAT32
    return queries + parts


def _explicit_bytes(num_in_decodes: int, num_in_chunks: int) -> int:
    """Return the bytes of `ExplicitAttention`'s scores, of their softmax, and of either in another dtype.

    Args:
        num_in_decodes: the largest number of scores of decodes that are computed together.
        num_in_chunks: the same for all chunks of a step, of which some tokens are computed together.
    """
    return 3 * max(num_in_decodes * _FLOAT32, min(SCORE_BYTES, num_in_chunks * _FLOAT32))


def _native_token_bytes(spec: ModelSpec, tp_size: int, dtype: torch.dtype) -> int:
    """Return the bytes that one token needs within a layer, without experts, if native kernels compute the layer."""
    num_heads, num_kv_heads = spec.num_heads // tp_size, spec.kv_heads_per_rank(tp_size)
    attention = (2 * num_heads + 2 * num_kv_heads) * spec.head_dim
    if spec.latent is not None:
        attention = _latent_numbers(spec, spec.latent, tp_size, is_native=True)
    feed_forward = 0 if spec.moe is not None else 3 * spec.intermediate_size // tp_size
    return (4 * spec.hidden_size + max(attention, feed_forward)) * dtype.itemsize


def _token_bytes(spec: ModelSpec, tp_size: int, dtype: torch.dtype, batch_invariant: bool) -> int:
    """Return the bytes that one token needs within a layer, without experts, in plain torch."""
    num_heads, num_kv_heads = spec.num_heads // tp_size, spec.kv_heads_per_rank(tp_size)
    attention = (5 * num_heads + 6 * num_kv_heads) * spec.head_dim
    if spec.latent is not None:
        attention = _latent_numbers(spec, spec.latent, tp_size, is_native=False)
    # norms and rotations compute in float32; for batch invariance, on a few rows at a time
    wide = _FLOAT32 // dtype.itemsize + (not batch_invariant)
    feed_forward = 0 if spec.moe is not None else 4 * spec.intermediate_size // tp_size
    numbers = (3 + wide) * spec.hidden_size + wide * attention + feed_forward
    write_rows = 4 * num_kv_heads * _INT64
    return numbers * dtype.itemsize + write_rows


def _state_bytes(
    state: StateSpec, hidden_size: int, limits: StepLimits, tp_size: int, dtype: torch.dtype, *, native: bool
) -> int:
    """Return the bytes of a step within a layer that keeps a state.

    `native`: whether native kernels compute it.
    """
    own, num_seqs = state.of_rank(tp_size), min(limits.num_seqs, limits.num_tokens)
    if native:
        in_dtype = 3 * hidden_size + own.num_channels + 2 * own.num_v_heads + 3 * own.num_values
        return limits.num_tokens * (in_dtype * dtype.itemsize + own.num_channels * _FLOAT32)
    channels, keys, values = own.num_channels, own.num_v_heads * own.k_dim, own.num_values
    in_dtype = 3 * hidden_size + 2 * channels + 2 * own.num_v_heads + 3 * values
    in_float32 = 2 * channels + 3 * keys + 2 * values + 6 * own.num_v_heads
    tokens = limits.num_tokens * (in_dtype * dtype.itemsize + in_float32 * _FLOAT32 + own.conv_size * _INT64)
    # a copy of each decode's state, and what chunks of a prompt's tokens are to each other
    decodes = num_seqs * (own.state_numbers() * _FLOAT32 + 3 * channels * own.conv_size * dtype.itemsize)
    chunk = own.num_v_heads * CHUNK * (6 * CHUNK + 4 * (own.k_dim + own.v_dim)) * _FLOAT32
    return tokens + max(decodes, chunk + own.state_numbers() * _FLOAT32)


def _expert_bytes(spec: ModelSpec, limits: StepLimits, tp_size: int, dtype: torch.dtype, native: bool) -> int:
    """Return the bytes of one token's copies for its experts, and of the experts' results, or of the shared experts'.

    If engines share experts, this includes one token of each of these engines.
    """
    if spec.moe is None:
        return 0
    pair = (3 * spec.hidden_size + 3 * spec.moe.intermediate_size) * dtype.itemsize + 4 * _INT64
    moe, scores = spec.moe, spec.moe.num_experts * _FLOAT32
    experts = moe.num_experts_per_tok * pair + 3 * scores
    if not moe.router.is_plain:
        experts = max(experts, 6 * scores)
    results = 4 * spec.hidden_size * dtype.itemsize
    shared_size = 0 if moe.shared is None else moe.shared.intermediate_size // tp_size
    shared = (3 if native else 4) * shared_size * dtype.itemsize
    return max(limits.num_expert_engines * experts, shared) + limits.num_expert_engines * results


def _logits_bytes(spec: ModelSpec, limits: StepLimits, tp_size: int, dtype: torch.dtype, *, row_by_row: bool) -> int:
    """Return the bytes of a step's logits, and of the memory for sampling from some of their rows at a time.

    Args:
        row_by_row: whether prompts' log probabilities are computed without copying several rows of logits.
    """
    num_samples = min(limits.num_seqs * limits.num_samples_per_seq, limits.num_tokens)
    num_together = rows_at_a_time(spec.vocab_size)
    num_rows = min(num_together, max(num_samples, limits.num_tokens))
    copies = 1 if tp_size == 1 else 3
    row_bytes = spec.vocab_size * copies * dtype.itemsize
    if spec.logits_softcap is not None:
        row_bytes += spec.vocab_size * 2 * _FLOAT32
    logits = max(num_samples, num_rows) * row_bytes
    hidden = 2 * limits.num_tokens * spec.hidden_size * dtype.itemsize
    penalties = max_penalty_bytes(num_samples, limits.max_model_len)
    num_copied = min(num_samples, num_together) if row_by_row else num_rows
    processed = limits.num_seqs * spec.vocab_size * _FLOAT32 * _PROCESSED_COPIES if limits.processes_all_logits else 0
    return logits + hidden + num_copied * spec.vocab_size * _FLOAT32 * _LOGITS_COPIES + processed + penalties
