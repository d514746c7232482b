"""An upper bound on the memory that a step needs in addition to weights and KV cache.

Memory that grows with the product of two limits is bounded where it is allocated (`GatherScratch`, `rows_at_a_time`),
and counted with the same functions. Other memory grows with the number of tokens in a step. Of that, the tensors are
counted that exist at the moment when most memory is in use. `MixerMemory` counts what mixing tokens needs,
`FeedForwardSpec` what feed-forward parts need, and this module the rest. A test compares the bound with what steps
allocate.

Not included: results of requests, such as the log probabilities of a whole vocabulary for every token of a prompt.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from raycore.class_paths import import_path
from raycore.models.spec import ModelSpec
from raycore.parts.pooling.models.pooling import PoolingSpec
from raycore.sampling.logits import max_penalty_bytes
from raycore.sampling.sampler import rows_at_a_time
from raycore.step.memory import FLOAT32_BYTES, INT64_BYTES, MixerMemory, StepLimits

_LOGITS_COPIES = 8
"""Number of float32 copies of the logits that exist at once while the sampler sorts them for top-p."""
_PROCESSED_COPIES = 4
"""Number of float32 copies of all logits that exist at once around users' logits processors."""
_FIXED_BYTES = 4 << 20
"""Constants, and buffers inside torch's functions."""


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
    mixers = _mixer_memories(spec, limits, tp_size, dtype, batch_invariant)
    is_native = native and native_attention
    mixed = max(mixer.token_numbers(is_native=is_native) for mixer in mixers)
    # norms and rotations compute in float32; for batch invariance, on a few rows at a time
    wide = FLOAT32_BYTES // dtype.itemsize + (not batch_invariant)
    of_token = _token_bytes(spec, limits, tp_size, dtype, wide, mixed, is_native=is_native)
    layer = max(limits.num_tokens * of_token, *(mixer.layer_bytes(is_native=native) for mixer in mixers))
    if spec.pooling is not None:
        logits = _pooling_bytes(spec, spec.pooling, limits, dtype)
    else:
        logits = _logits_bytes(spec, limits, tp_size, dtype, row_by_row=batch_invariant or native)
    batch = limits.num_seqs * (limits.max_model_len + 1) * 4
    if limits.context_size > 1:
        layer += max(mixer.exchanged_bytes() for mixer in mixers)
    windows = set(spec.layer_windows) if windows is None else windows
    attention = 0 if native_attention else sum(mixer.attention_bytes(windows) for mixer in mixers)
    return _FIXED_BYTES + batch + attention + max(layer, logits)


def _pooling_bytes(spec: ModelSpec, pooling: PoolingSpec, limits: StepLimits, dtype: torch.dtype) -> int:
    """Return the bytes of final hidden states, and of the results of each token of a step."""
    hidden = spec.hidden_size * (2 * dtype.itemsize + FLOAT32_BYTES)
    results = 4 * pooling.widest(spec.hidden_size) * FLOAT32_BYTES
    return limits.num_tokens * (hidden + results)


def scratch_bytes(spec: ModelSpec, limits: StepLimits, tp_size: int, dtype: torch.dtype, batch_invariant: bool) -> int:
    """Return the bytes of the scratch memory of attention in plain torch, which is kept between steps."""
    return sum(mixer.scratch_bytes() for mixer in _mixer_memories(spec, limits, tp_size, dtype, batch_invariant))


def _mixer_memories(
    spec: ModelSpec, limits: StepLimits, tp_size: int, dtype: torch.dtype, batch_invariant: bool
) -> list[MixerMemory]:
    return [import_path(kind.memory)(kind, spec, limits, tp_size, dtype, batch_invariant) for kind in spec.mixer_kinds]


def _token_bytes(
    spec: ModelSpec, limits: StepLimits, tp_size: int, dtype: torch.dtype, wide: int, mixed: int, *, is_native: bool
) -> int:
    """Return the bytes that one token needs within a layer; with engines that share experts, one token of each engine.

    Args:
        wide: how many copies of each number in the mixer there are in plain torch. Of a hidden state, there are 3 more.
        mixed: how many numbers the token has in the mixer.
        is_native: whether native kernels compute the layer.
    """
    hidden, rows = 4 * spec.hidden_size, 0
    if not is_native:
        hidden, mixed = (3 + wide) * spec.hidden_size, wide * mixed
        num_kv_heads = max(each.heads(spec, tp_size).num_kv_heads for each in spec.attentions)
        rows = 4 * num_kv_heads * INT64_BYTES
    sizes = mixed * dtype.itemsize, tp_size, dtype.itemsize, limits.num_expert_engines
    parts = [kind.token_bytes(spec, *sizes, is_native=is_native) for kind in spec.feed_forward_kinds]
    return hidden * dtype.itemsize + rows + max(parts, default=0)


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
        row_bytes += spec.vocab_size * 2 * FLOAT32_BYTES
    logits = max(num_samples, num_rows) * row_bytes
    hidden = 2 * limits.num_tokens * spec.hidden_size * dtype.itemsize
    penalties = max_penalty_bytes(num_samples, limits.max_model_len)
    num_copied = min(num_samples, num_together) if row_by_row else num_rows
    processed = (
        limits.num_seqs * spec.vocab_size * FLOAT32_BYTES * _PROCESSED_COPIES if limits.processes_all_logits else 0
    )
    return logits + hidden + num_copied * spec.vocab_size * FLOAT32_BYTES * _LOGITS_COPIES + processed + penalties
