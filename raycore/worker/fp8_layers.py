"""Chooses which linear layers get fp8 weights, by the option `quantization`, the checkpoint, and the device."""

from __future__ import annotations

import logging

import torch

from raycore.checkpoint.model_spec import ModelSpec
from raycore.config import ModelConfig
from raycore.errors import InvalidConfig
from raycore.model import fp8_linear
from raycore.model.weights.loader import Fp8Layers

logger = logging.getLogger(__name__)


def choose_fp8(model: ModelConfig, tp_size: int, device: torch.device) -> Fp8Layers:
    """Return the linear layers that get fp8 weights on one of `tp_size` ranks.

    A checkpoint's fp8 weights are converted, with a warning, where products in fp8 can't be used, and its integers are
    converted in any case.

    Raises:
        InvalidConfig: `quantization="fp8"` can't be used here.
    """
    stored = model.spec.quantization
    if stored is not None and stored.stores_integers:
        logger.warning(
            "the checkpoint's integer weights (quant_method=%r) are converted, and take twice the memory or more",
            stored.method,
        )
    if model.quantization is None and not model.spec.stores_fp8:
        return "none"
    reason = fp8_linear.unsupported_reason(device) or _unsupported_model(model, tp_size)
    if reason is None:
        return "stored" if model.quantization is None else "all"
    if model.quantization is not None:
        raise InvalidConfig(f"quantization={model.quantization!r}: {reason}. Omit the option")
    logger.warning("the checkpoint's fp8 weights are converted, and take twice the memory or more: %s", reason)
    return "none"


def _unsupported_model(model: ModelConfig, tp_size: int) -> str | None:
    if model.batch_invariant:
        return "products in fp8 aren't batch-invariant, and batch_invariant=True"
    if model.spec.moe is not None:
        return "experts aren't computed in fp8"
    odd = {name: size for name, size in _layer_sizes(model.spec, tp_size).items() if size % fp8_linear.MULTIPLE}
    if odd:
        sizes = " and ".join(f"{size} {name}" for name, size in odd.items())
        return (
            f"products in fp8 need sizes that are multiples of {fp8_linear.MULTIPLE}, and with "
            f"tensor_parallel_size={tp_size} a rank has {sizes}"
        )
    return None


def _layer_sizes(spec: ModelSpec, tp_size: int) -> dict[str, int]:
    """Return the numbers of inputs and outputs of linear layers on a rank, by what they are."""
    num_heads, num_kv_heads = spec.num_heads // tp_size, spec.kv_heads_per_rank(tp_size)
    return {
        "hidden dimensions": spec.hidden_size,
        "query dimensions": num_heads * spec.head_dim,
        "query, key and value dimensions": (num_heads + 2 * num_kv_heads) * spec.head_dim,
        "feed-forward dimensions": spec.intermediate_size // tp_size,
    }
