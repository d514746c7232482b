"""Chooses what computes attention, what computes everything else, and what the KV cache stores, by options and by what
this process can use.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from raycore.attention import native
from raycore.attention.native_latent import supports_latents
from raycore.config.cache import CACHE_BACKENDS
from raycore.errors import InvalidConfig
from raycore.kernels import Backend
from raycore.kernels import library as native_kernels
from raycore.layers import fp8_linear
from raycore.models.mixers.spec import HeadShape
from raycore.models.spec import ModelSpec

logger = logging.getLogger(__name__)


def choose_attention_backend(
    asked: str, device: torch.device, shapes: Sequence[HeadShape], block_size: int, dtype: torch.dtype
) -> Backend:
    """Return the backend that was asked for. `auto` is the fastest one that can be used here.

    `shapes`: of all layers, each one once.

    Raises:
        InvalidConfig: the backend can't be used on this device, or with these sizes.
    """
    if asked == "torch":
        return "torch"
    fastest = _fastest(device)
    if asked not in ("auto", fastest):
        raise InvalidConfig(
            f"attention_backend={asked!r} isn't for device={device.type!r}: use {fastest!r}, 'torch' or 'auto'"
        )
    no_kernels = _why_no_kernels(device)
    of_sizes = (_why_not_these_sizes(device, heads, block_size, dtype) for heads in shapes)
    reason = no_kernels or next(filter(None, of_sizes), None)
    if reason is None:
        return fastest
    if asked == fastest:
        raise InvalidConfig(f"attention_backend={asked!r}: {reason}. Use 'torch' or 'auto', which are slower here")
    # the log says already if there are no native kernels
    if device.type == "cuda" or no_kernels is None:
        logger.warning("attention is computed by plain torch, which is slow: %s", reason)
    return "torch"


def choose_divided_backend(backend: Backend, asked: str, spec: ModelSpec) -> Backend:
    """Return what computes attention to one worker's share of the keys, where `backend` computes that to all keys.

    Raises:
        InvalidConfig: these kernels were asked for, and can't.
    """
    reason = _why_no_share(backend, spec)
    if reason is None:
        return backend
    if asked == backend:
        raise InvalidConfig(f"attention_backend={asked!r}: {reason}. Use 'torch' or 'auto', which are slower here")
    logger.warning("attention is computed by plain torch, which is slow: %s", reason)
    return "torch"


def choose_operations_backend(asked: str, device: torch.device) -> Backend:
    """Return what computes everything but attention, for the option `attention_backend`.

    That is plain torch only where it was asked for, or where there are no kernels: the sizes of attention don't matter.
    """
    return "torch" if asked == "torch" or _why_no_kernels(device) else _fastest(device)


def _fastest(device: torch.device) -> Backend:
    return "triton" if device.type == "cuda" else "native"


def choose_cache_dtype(
    asked: str, backend: Backend, device: torch.device, dtype: torch.dtype, heads: HeadShape
) -> torch.dtype:
    """Return the dtype of the numbers in the KV cache, for the option `kv_cache_dtype`. `dtype`: the model's.

    Raises:
        InvalidConfig: this backend or this device can't use such a cache.
    """
    needed = CACHE_BACKENDS.get(asked)
    if needed is None:
        return dtype
    if heads.latent_rank is not None:
        raise InvalidConfig(
            f"kv_cache_dtype={asked!r}: the cache of latent attention, which is small already, isn't kept in 8 bits. "
            "Omit it"
        )
    if backend != needed:
        if (device.type == "cpu") == (needed == "native"):
            advice = f"Omit it. With attention_backend={needed!r}, the error says what is missing"
        else:
            advice = f"Use {'fp8' if needed == 'native' else 'int8_per_token_head'!r}, or omit it"
        raise InvalidConfig(
            f"kv_cache_dtype={asked!r} needs attention_backend={needed!r}, and attention is computed by {backend!r} on "
            f"{device.type!r}. {advice}"
        )
    if needed == "native":
        return torch.int8
    if reason := fp8_linear.why_no_fp8(device):
        raise InvalidConfig(f"kv_cache_dtype={asked!r}: {reason}. Omit it")
    return torch.float8_e4m3fn


def _why_no_share(backend: Backend, spec: ModelSpec) -> str | None:
    """Return why these kernels can't attend to a share of the keys. None: they can."""
    if backend == "triton":
        has_latents = any(each.heads(spec, 1).latent_rank is not None for each in spec.attentions)
        return "with context parallelism, the GPU kernels know no latents" if has_latents else None
    if backend == "torch" or spec.vision is None:
        return None
    has_axes = any(each is not None and each.sections for each in spec.rotations)
    if not has_axes and not spec.vision.is_bidirectional:
        return None
    return (
        "with context parallelism, the native kernels know neither rotations by three positions nor images whose "
        "tokens see each other"
    )


def _why_no_kernels(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None if native_kernels.load() else "raycore's native kernels can't be used, the log says why"
    try:
        # Triton comes with torch's CUDA builds, and importing it takes a second
        import raycore.kernels.gpu.attention  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        return f"Triton can't be imported ({error})"
    return None


def _why_not_these_sizes(device: torch.device, heads: HeadShape, block_size: int, dtype: torch.dtype) -> str | None:
    if heads.index is not None and (device.type == "cuda" or heads.latent_rank is None):
        selected = "blocks (index_topk_blocks)" if heads.latent_rank is None else "tokens (index_topk)"
        return f"no kernels for device={device.type!r} attend to selected {selected}"
    if heads.latent_rank is not None:
        return _why_not_these_latents(device, heads.latent_rank, heads.head_dim, dtype)
    if device.type == "cuda":
        from raycore.kernels.gpu.attention import unsupported_reason

        return unsupported_reason(heads.num_heads, heads.num_kv_heads, heads.head_dim, dtype)
    if not native.supports(heads.head_dim, block_size, dtype):
        return f"the native kernels don't support head_dim={heads.head_dim} with block_size={block_size} in {dtype}"
    return None


def _why_not_these_latents(device: torch.device, rank: int, width: int, dtype: torch.dtype) -> str | None:
    if device.type == "cuda":
        from raycore.kernels.gpu.latent_attention import unsupported_latents

        return unsupported_latents(rank, width - rank, dtype)
    if not supports_latents(rank, width, dtype):
        return f"the native kernels don't support kv_lora_rank={rank} with {width - rank} rotated elements in {dtype}"
    return None
