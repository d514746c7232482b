"""What a checkpoint's config.json says of quantized weights.

raycore reads one scheme, which compressed-tensors writes: weights in 8-bit floating point (float8_e4m3fn) with a scale
per row or per tensor, for activations that are quantized per token while they are computed.
"""

from __future__ import annotations

from raycore.checkpoint.json_fields import JsonFields

_KEYS = ("quantization_config", "compression_config")
"""The second is the name in files of older versions of compressed-tensors."""
_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}


def stores_fp8(config: JsonFields) -> bool:
    """Return whether weights of linear layers are stored in fp8.

    Raises:
        InvalidCheckpoint: weights are quantized in a way that raycore doesn't read. The message names what the file
            says.
    """
    keys = [key for key in _KEYS if config.get(key) is not None]
    for key in keys:
        _check(config.child(key))
    return bool(keys)


def _check(quantization: JsonFields) -> None:
    _require(quantization, "quant_method", "compressed-tensors")
    _require(quantization, "format", "float-quantized")
    if quantization.get("kv_cache_scheme") is not None:
        raise quantization.error("kv_cache_scheme", "no value: quantized KV caches aren't supported")
    groups = quantization.child("config_groups")
    if not groups.values:
        raise quantization.error("config_groups", "an object with a scheme of quantization")
    for name in groups.values:
        _check_group(groups.child(name))


def _check_group(group: JsonFields) -> None:
    weights, activations = group.child("weights"), group.child("input_activations")
    for key, expected in _FLOAT8.items():
        _require(weights, key, expected)
        _require(activations, key, expected)
    _require(weights, "strategy", "channel", "tensor")
    _require(activations, "dynamic", True)
    _require(activations, "strategy", "token")
    if group.get("output_activations") is not None:
        raise group.error("output_activations", "no value: only the inputs of linear layers may be quantized")


def _require(fields: JsonFields, key: str, *expected: object) -> None:
    if fields.get(key) not in expected:
        names = " or ".join(str(value).lower() if isinstance(value, bool) else repr(value) for value in expected)
        raise fields.error(key, f"{names}, because only fp8 weights of compressed-tensors are supported")
