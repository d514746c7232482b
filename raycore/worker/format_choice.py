"""Chooses the formats of linear layers' weights, by the options `quantization` and `cpu_activation_dtype`, the
checkpoint, and the device."""

from __future__ import annotations

import logging

import torch

from raycore.config import ModelConfig
from raycore.errors import InvalidConfig
from raycore.layers import fp8_linear
from raycore.models.quantization import Format
from raycore.models.spec import ModelSpec
from raycore.weights.linear_formats import LinearFormats

logger = logging.getLogger(__name__)

_NAMES: dict[Format, str] = {"fp8": "fp8", "fp8_blocks": "fp8, in blocks,", "integers": "integers"}


def choose_formats(
    model: ModelConfig, tp_size: int, device: torch.device, *, is_native: bool, shares_experts: bool
) -> LinearFormats:
    """Return the formats of linear layers' weights on one of `tp_size` ranks.

    What the checkpoint stores in fp8 or in integers is kept if the device computes with it, or else converted, with a
    warning.

    Args:
        is_native: whether native kernels compute.
        shares_experts: whether the rank shares experts by expert parallelism.

    Raises:
        InvalidConfig: the option `quantization` or `cpu_activation_dtype` can't be used here.
    """
    wanted, stored = model.quantization, model.spec.quantization
    others: Format | None = None if wanted is None else "fp8" if wanted == "fp8" else "integers"
    found: list[Format] = [] if stored is None else sorted(stored.formats)

    def find_reason(name: Format, *, is_stored: bool) -> str | None:
        if name == "integers" or (is_stored and device.type == "cpu"):
            return _why_not_packed(device, is_native, shares_experts, "integers" if name == "integers" else "fp8")
        if name == "fp8_blocks":
            return "no kernel here multiplies with a scale for each block of a weight"
        return fp8_linear.unsupported_reason(device) or _why_not_fp8(model, tp_size)

    # only of those that are needed: for fp8, a GPU multiplies matrices to find out
    reasons = {name: find_reason(name, is_stored=True) for name in found}
    why_not = None if others is None else find_reason(others, is_stored=False)
    if why_not is not None:
        if others != "fp8" or stored is None or not stored.is_fp8:
            raise InvalidConfig(f"quantization={wanted!r}: {why_not}. Omit the option")
        others = None  # the option says no more than the checkpoint
    if stored is not None and stored.is_ordered and reasons.get("integers") is None:
        reasons["integers"] = "the inputs of a group aren't neighbors (desc_act or actorder)"
    short_rows = model.cpu_activation_dtype == "int8"
    if short_rows and reasons.get("integers") is not None:
        raise InvalidConfig(f"cpu_activation_dtype='int8': {reasons['integers']}. Omit the option")
    for name in found:
        if reasons[name] is not None and others is None:
            _warn(name, reasons[name] or "", model)
    # whoever wants integers gets them of what is stored in fp8, too
    left = {"fp8", "fp8_blocks"} if others == "integers" else set[Format]()
    kept: frozenset[Format] = frozenset(name for name in found if reasons[name] is None and name not in left)
    return LinearFormats(kept, others, short_rows, device.type == "cpu" and not kept <= {"integers"})


def _warn(name: Format, reason: str, model: ModelConfig) -> None:
    """Log what it costs that weights aren't kept as they are stored."""
    spec = model.spec
    assert spec.quantization is not None
    experts = (part.expert_weights(spec) for part in spec.feed_forwards)
    num = sum(part.num_weights(spec) for part in (*spec.mixers, *spec.feed_forwards))
    num += sum(all_of_layer - used for all_of_layer, used in experts)
    are_floats = name == "integers" and spec.quantization.codes == {"e2m1"}
    logger.warning(
        "the checkpoint's weights in %s are converted: %s. With a data type of 16 bits, the model's layers take about "
        "%.2f GiB instead of at least %.2f, and steps with few tokens, which are bound by memory, longer in proportion",
        "4-bit floating point" if are_floats else _NAMES[name],
        reason,
        2 * num / 2**30,
        spec.quantization.bits(name) / 8 * num / 2**30,
    )


def _why_not_packed(device: torch.device, is_native: bool, shares_experts: bool, what: str) -> str | None:
    """Return why weights in `what` aren't packed for native kernels, or None if they are."""
    if device.type != "cpu":
        return f"products of {what} need a CPU, and the device is {device.type!r}"
    if not is_native:
        return f"products of {what} need raycore's native kernels, which can't be used, or aren't chosen, here"
    if shares_experts:
        return "experts move between ranks as numbers, and enable_expert_parallel=True"
    return None


def _why_not_fp8(model: ModelConfig, tp_size: int) -> str | None:
    if model.batch_invariant:
        return "products in fp8 aren't batch-invariant, and batch_invariant=True"
    why = model.spec.why_not("fp8")
    if why is not None:
        return why
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
    sizes = {"hidden dimensions": spec.hidden_size}
    for kind in spec.part_kinds:
        sizes |= kind.sizes(spec, tp_size)
    return sizes
