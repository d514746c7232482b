"""Of quantized checkpoints, those in fp8 by compressed-tensors are read. The errors name what others say."""

from __future__ import annotations

from typing import Any

import pytest

from raycore.checkpoint.json_fields import JsonFields
from raycore.checkpoint.quantization import stores_fp8
from raycore.errors import InvalidCheckpoint

WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
ACTIVATIONS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}


def config(
    weights: dict[str, Any] | None = None,
    activations: dict[str, Any] | None = None,
    key: str = "quantization_config",
    **changed: Any,
) -> JsonFields:
    """A config.json, with changed values of the weights' and the activations' schemes, and of the outer object."""
    group = {
        "weights": WEIGHTS | (weights or {}),
        "input_activations": ACTIVATIONS | (activations or {}),
        "output_activations": None,
        "targets": ["Linear"],
    }
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }
    return JsonFields("config.json", {key: quantization | changed})


def test_fp8_is_found() -> None:
    assert not stores_fp8(JsonFields("config.json", {}))
    assert not stores_fp8(JsonFields("config.json", {"quantization_config": None}))
    assert stores_fp8(config())
    assert stores_fp8(config(weights={"strategy": "tensor"}))
    assert stores_fp8(config(key="compression_config"))


@pytest.mark.parametrize(
    ("changed", "fragments"),
    [
        ({"quant_method": "gptq"}, ["quantization_config: quant_method='gptq'", "'compressed-tensors'"]),
        ({"format": "pack-quantized"}, ["format='pack-quantized'", "'float-quantized'"]),
        ({"kv_cache_scheme": {"num_bits": 8}}, ["kv_cache_scheme={'num_bits': 8}", "KV caches"]),
        ({"config_groups": {}}, ["config_groups"]),
        ({"weights": {"num_bits": 4}}, ["group_0, weights: num_bits=4: expected 8"]),
        ({"weights": {"type": "int"}}, ["weights: type='int': expected 'float'"]),
        ({"weights": {"strategy": "block"}}, ["weights: strategy='block': expected 'channel' or 'tensor'"]),
        ({"activations": {"dynamic": False}}, ["input_activations: dynamic=False: expected true"]),
        ({"activations": {"strategy": "tensor"}}, ["input_activations: strategy='tensor': expected 'token'"]),
    ],
)
def test_other_schemes_are_named(changed: dict[str, Any], fragments: list[str]) -> None:
    with pytest.raises(InvalidCheckpoint) as raised:
        stores_fp8(config(**changed))
    for fragment in ("config.json", *fragments):
        assert fragment in str(raised.value)
