"""Which layers of a checkpoint are quantized, and how. The errors name what raycore doesn't read."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from raycore.errors import InvalidCheckpoint
from raycore.json_fields import JsonFields
from raycore.models.quantization import Quantization, WeightScheme, parse_quantization, stored_scheme

WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
ACTIVATIONS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}

INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
GROUPS = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}


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


def parsed(**quantization: Any) -> Quantization:
    found = parse_quantization(JsonFields("config.json", {"quantization_config": quantization}))
    assert found is not None
    return found


def test_mxfp4_checkpoints_are_recognized() -> None:
    found = parsed(quant_method="mxfp4", modules_to_not_convert=["lm_head"])
    assert found.experts == WeightScheme("mxfp4", 4, 32, code="e2m1")
    assert found.formats == {"integers"}
    assert found.scheme_of("model.layers.0.self_attn.q_proj") is None


def test_fp8_checkpoints_of_compressed_tensors_are_recognized() -> None:
    assert parse_quantization(JsonFields("config.json", {})) is None
    assert parse_quantization(JsonFields("config.json", {"quantization_config": None})) is None
    for fields in (config(), config(weights={"strategy": "tensor"}), config(key="compression_config")):
        found = parse_quantization(fields)
        assert found is not None
        assert found.formats == {"fp8"}
        assert found.scheme_of("model.layers.3.mlp.up_proj") == WeightScheme("float8", 8)
        assert found.scheme_of("lm_head") is None


def test_inputs_of_weights_in_fp8_may_keep_16_bits() -> None:
    group = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None}
    found = parse_quantization(config(config_groups={"group_0": group}))
    assert found is not None
    assert found.scheme_of("model.layers.3.mlp.up_proj") == WeightScheme("float8", 8)


@pytest.mark.parametrize(
    ("layer", "scheme"),
    [
        ("model.layers.0.mlp.up_proj", WeightScheme("int8", 8)),
        ("model.layers.0.mlp.down_proj", WeightScheme("packed", 4, 32, symmetric=False)),
        ("model.layers.1.mlp.down_proj", WeightScheme("int8", 8)),
        ("model.layers.0.self_attn.q_proj", WeightScheme("packed", 4, 32, symmetric=False)),
        ("model.layers.0.self_attn.o_proj", None),
        ("model.layers.0.block_sparse_moe.gate", None),
        ("lm_head", WeightScheme("int8", 8)),
        ("model.embed_tokens", None),
    ],
)
def test_a_layer_has_the_scheme_of_the_target_that_fits_it_best(layer: str, scheme: WeightScheme | None) -> None:
    """Names come before expressions, and expressions before classes, whatever the order of the groups."""
    found = parsed(
        quant_method="compressed-tensors",
        format="mixed-precision",
        config_groups={
            "group_0": {"format": "int-quantized", "targets": ["Linear"], "weights": INT8},
            "group_1": {
                "format": "pack-quantized",
                "targets": ["re:.*self_attn", "model.layers.0.mlp.down_proj"],
                "weights": GROUPS,
            },
        },
        ignore=["model.layers.0.self_attn.o_proj", "re:.*gate$"],
    )
    assert found.scheme_of(layer) == scheme


def test_embeddings_are_quantized_if_they_are_a_target() -> None:
    group = {"targets": ["Embedding"], "weights": INT8}
    found = parsed(quant_method="compressed-tensors", format="int-quantized", config_groups={"group_0": group})
    assert found.scheme_of("model.embed_tokens") == WeightScheme("int8", 8)
    assert found.scheme_of("lm_head") is None


@pytest.mark.parametrize(
    ("fields", "scheme"),
    [
        ({}, WeightScheme("gptq", 4, 128, False, False, zero_offset=1)),
        ({"checkpoint_format": "gptq"}, WeightScheme("gptq", 4, 128, False, False, zero_offset=1)),
        ({"checkpoint_format": "gptq_v2"}, WeightScheme("gptq", 4, 128, False, False, zero_offset=0)),
        ({"desc_act": True, "bits": 8}, WeightScheme("gptq", 8, 128, False, True, zero_offset=1)),
        ({"group_size": -1, "sym": False}, WeightScheme("gptq", 4, None, False, False, zero_offset=1)),
        ({"dynamic": {"-:.*up_proj": {}}}, None),
        ({"dynamic": {"+:.*up_proj": {"bits": 8}, ".*": {}}}, WeightScheme("gptq", 8, 128, False, False, 1)),
    ],
)
def test_gptq_checkpoints_have_one_scheme_with_exceptions(fields: dict[str, Any], scheme: WeightScheme | None) -> None:
    found = parsed(**{"quant_method": "gptq", "bits": 4, "group_size": 128} | fields)
    assert found.scheme_of("model.layers.7.mlp.up_proj") == scheme


def test_awq_checkpoints_are_recognized() -> None:
    assert parsed(quant_method="awq", bits=4, group_size=128, version="GEMM", zero_point=True).scheme_of(
        "model.layers.0.mlp.up_proj"
    ) == WeightScheme("awq", 4, 128, False)


FP8_LAYER = WeightScheme("float8", 8, scales="weight_scale_inv")


@pytest.mark.parametrize(
    ("fields", "scheme"),
    [
        ({"weight_block_size": [128, 128]}, msgspec.structs.replace(FP8_LAYER, block=(128, 128))),
        ({"weight_block_size": None, "activation_scheme": "static"}, FP8_LAYER),
        ({"modules_to_not_convert": ["up_proj"]}, FP8_LAYER),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, WeightScheme("float8", 8)),
    ],
)
def test_fp8_checkpoints_have_one_scheme(fields: dict[str, Any], scheme: WeightScheme) -> None:
    found = parsed(**{"quant_method": "fp8"} | fields)
    assert found.scheme_of("model.layers.0.mlp.up_proj") == scheme
    assert found.formats == {"fp8" if scheme.block is None else "fp8_blocks"}
    assert found.bits(scheme.format) == 8


NVFP4 = WeightScheme("fp4", 4, 16, code="e2m1")


@pytest.mark.parametrize(
    ("fields", "scheme"),
    [
        ({"format": "nvfp4-pack-quantized", "weights": {"num_bits": 4, "group_size": 16}}, NVFP4),
        (
            {"format": "mxfp4-pack-quantized", "weights": {"num_bits": 4, "group_size": 32}},
            WeightScheme("fp4", 4, 32, code="e2m1"),
        ),
        (
            {"format": "mxfp8-quantized", "weights": {"strategy": "group", "group_size": 32}},
            WeightScheme("float8", 8, block=(1, 32)),
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}, NVFP4),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]}, WeightScheme("float8", 8)),
        (
            {"quant_method": "modelopt", "quant_algo": "MXFP8", "group_size": 32},
            WeightScheme("float8", 8, block=(1, 32)),
        ),
    ],
)
def test_groups_of_numbers_in_floating_point_are_recognized(fields: dict[str, Any], scheme: WeightScheme) -> None:
    found = parse_quantization(config(**fields))
    assert found is not None
    assert found.scheme_of("model.layers.0.mlp.up_proj") == scheme
    assert found.formats == {scheme.format}
    assert found.row_bits == (set() if scheme.layout == "float8" else {16})


def ao(kind: str, **data: Any) -> dict[str, Any]:
    """A configuration of TorchAO, as it writes them."""
    return {"_type": kind, "_version": 2, "_data": data}


def ao_parsed(config: dict[str, Any]) -> Quantization:
    return parsed(quant_method="torchao", quant_type={"default": config})


AO = {"numbers": "_weight_qdata"}
AO_FP8 = {"scales": "_weight_scale", **AO}
GROUP = ao("PerGroup", group_size=32)
PLAIN = ao("Int4PackingFormat") | {"_data": "PLAIN"}


@pytest.mark.parametrize(
    ("config", "scheme"),
    [
        (ao("Int8WeightOnlyConfig", granularity=ao("PerRow", dim=-1)), WeightScheme("torchao", 8, **AO)),
        (ao("Int8WeightOnlyConfig", granularity=GROUP), WeightScheme("torchao", 8, 32, **AO)),
        (
            ao("Int8DynamicActivationInt8WeightConfig", granularity=[ao("PerRow"), GROUP]),
            WeightScheme("torchao", 8, 32, row_bits=8, **AO),
        ),
        (
            ao("Int8DynamicActivationIntxWeightConfig", weight_granularity=GROUP),
            WeightScheme("torchao", 8, 32, **AO),
        ),
        (
            ao("Int4WeightOnlyConfig", group_size=128, int4_packing_format=PLAIN),
            WeightScheme("torchao", 4, 128, code="affine", **AO),
        ),
        (ao("Float8WeightOnlyConfig"), WeightScheme("float8", 8, **AO_FP8)),
        (
            ao("Float8DynamicActivationFloat8WeightConfig", granularity=[ao("PerTensor"), ao("PerTensor")]),
            WeightScheme("float8", 8, **AO_FP8),
        ),
        (
            ao(
                "Float8DynamicActivationFloat8WeightConfig",
                granularity=[ao("PerBlock", block_size=[1, 128]), ao("PerBlock", block_size=[128, 128])],
            ),
            WeightScheme("float8", 8, block=(128, 128), **AO_FP8),
        ),
    ],
)
def test_torchaos_configurations_are_recognized(config: dict[str, Any], scheme: WeightScheme) -> None:
    found, name = ao_parsed(config), "model.layers.0.mlp.up_proj.weight"
    assert found.scheme_of("model.layers.0.mlp.up_proj") == scheme
    assert found.scheme_of("model.embed_tokens") == scheme
    assert stored_scheme(found, {name}.__contains__, name) is None
    marker = scheme.tensor(name, scheme.marker)
    assert marker.startswith("model.layers.0.mlp.up_proj._weight_")
    assert stored_scheme(found, {marker}.__contains__, name) == scheme


def test_torchaos_layers_may_have_configurations_of_their_own() -> None:
    names = {
        "re:.*mlp.*": ao("Float8WeightOnlyConfig"),
        "model.layers.0.mlp.up_proj.weight": ao("Int8WeightOnlyConfig"),
        "model.layers.1.mlp.up_proj": None,
        "re:.*mlp": ao("Int8WeightOnlyConfig"),  # it doesn't match whole names
        "_default": ao("IntxWeightOnlyConfig", granularity=GROUP),
    }
    found = ao_parsed(ao("FqnToConfig", fqn_to_config=names))
    assert found.scheme_of("model.layers.0.mlp.up_proj") == WeightScheme("torchao", 8, **AO)
    assert found.scheme_of("model.layers.1.mlp.up_proj") is None
    assert found.scheme_of("model.layers.2.mlp.up_proj") == WeightScheme("float8", 8, **AO_FP8)
    assert found.scheme_of("model.layers.2.self_attn.o_proj") == WeightScheme("torchao", 8, 32, **AO)
    without = ao_parsed(ao("ModuleFqnToConfig", module_fqn_to_config={"lm_head": ao("Int8WeightOnlyConfig")}))
    assert without.scheme_of("model.layers.0.mlp.up_proj") is None
    assert without.scheme_of("lm_head") is not None


@pytest.mark.parametrize(
    ("kinds", "fragments"),
    [
        ("int8_weight_only", ["quant_type='int8_weight_only'", "an object"]),
        (
            {"default": ao("UIntXWeightOnlyConfig")},
            ["default: _type='UIntXWeightOnlyConfig'", "'Int8WeightOnlyConfig'"],
        ),
        (
            {"default": ao("Int4WeightOnlyConfig", int4_packing_format={"_data": "TILE_PACKED_TO_4D"})},
            ["int4_packing_format: _data='TILE_PACKED_TO_4D': expected 'PLAIN'"],
        ),
        (
            {"default": ao("IntxWeightOnlyConfig", intx_packing_format={"_data": "OPAQUE_TORCHAO_AUTO"})},
            ["intx_packing_format: _data='OPAQUE_TORCHAO_AUTO': expected 'UNPACKED_TO_INT8'"],
        ),
        (
            {"default": ao("Float8WeightOnlyConfig", weight_dtype={"_data": "float8_e5m2"})},
            ["weight_dtype: _data='float8_e5m2': expected 'float8_e4m3fn'"],
        ),
        (
            {"default": ao("Int8WeightOnlyConfig", granularity=ao("PerBlock", block_size=[2, 2]))},
            ["granularity: _type='PerBlock': expected 'PerRow'"],
        ),
        (
            {"default": ao("FqnToConfig", fqn_to_config={"re:(": ao("Int8WeightOnlyConfig")})},
            ["fqn_to_config: re:(", "regular expressions"],
        ),
    ],
)
def test_what_torchao_writes_otherwise_is_refused_by_name(kinds: Any, fragments: list[str]) -> None:
    with pytest.raises(InvalidCheckpoint) as raised:
        parsed(quant_method="torchao", quant_type=kinds)
    for fragment in fragments:
        assert fragment in str(raised.value)


def test_scales_for_a_cache_are_not_used() -> None:
    assert parse_quantization(config(kv_cache_scheme={"num_bits": 8})) == parse_quantization(config())


def test_nothing_is_quantized_if_only_the_cache_is() -> None:
    assert parse_quantization(config(quant_method="modelopt", quant_algo=None, kv_cache_quant_algo="FP8")) is None
    assert parse_quantization(config(format="dense", config_groups={}, kv_cache_scheme={"num_bits": 8})) is None


def test_the_files_say_which_layers_are_in_fp8_and_what_their_scales_are_called() -> None:
    found, name = parsed(quant_method="fp8", weight_block_size=[128, 128]), "model.layers.0.mlp.down_proj.weight"
    for scales in ("weight_scale", "weight_scale_inv"):
        scheme = stored_scheme(found, {name, name.replace("weight", scales)}.__contains__, name)
        assert scheme is not None
        assert scheme.marker == scales
    assert stored_scheme(found, {name}.__contains__, name) is None
    stacked = "model.layers.0.mlp.experts.down_proj"
    assert stored_scheme(found, {stacked}.__contains__, stacked) is None
    scheme = stored_scheme(found, {stacked, f"{stacked}_scale_inv"}.__contains__, stacked)
    assert scheme is not None
    assert scheme.tensor(stacked, scheme.marker) == f"{stacked}_scale_inv"
    assert (
        stored_scheme(parsed(quant_method="fp8"), {stacked, f"{stacked}_scale_inv"}.__contains__, stacked) == FP8_LAYER
    )


PACKED = {"format": "pack-quantized"}
FP8 = {"quant_method": "fp8", "format": None}
FP4 = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
MODELOPT = {"quant_method": "modelopt", "format": None, "quant_algo": "NVFP4"}
GPTQ = {"quant_method": "gptq", "format": None, "bits": 4, "group_size": 128}
AWQ = {"quant_method": "awq", "format": None, "bits": 4, "group_size": 128}


@pytest.mark.parametrize(
    ("changed", "fragments"),
    [
        ({"quant_method": "bitsandbytes"}, ["quantization_config: quant_method='bitsandbytes'", "'gptq'", "'awq'"]),
        (FP8 | {"weight_block_size": [128]}, ["weight_block_size=[128]: expected a list of two positive integers"]),
        (FP8 | {"weight_block_size": [128, 0]}, ["weight_block_size=[128, 0]"]),
        (FP8 | {"activation_scheme": "tensor"}, ["activation_scheme='tensor': expected 'dynamic' or 'static'"]),
        (FP8 | {"fmt": "e5m2"}, ["fmt='e5m2': expected 'e4m3'"]),
        (FP8 | {"expert_dtype": "fp4"}, ["expert_dtype='fp4': expected 'fp8'"]),
        ({"format": "marlin-24"}, ["format='marlin-24'", "'float-quantized'", "'pack-quantized'"]),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, ["sparsity_config", "sparse-24-bitmask"]),
        ({"moe_sparsity_config": {"layers": {}}}, ["moe_sparsity_config", "sparse experts"]),
        ({"transform_config": {"config_groups": {"R1": {}}}}, ["transform_config", "R1"]),
        ({"config_groups": {}}, ["config_groups"]),
        ({"ignore": ["re:("]}, ["ignore=['re:(']", "regular expression"]),
        ({"weights": {"num_bits": 4}}, ["group_0, weights: num_bits=4: expected 8"]),
        ({"weights": {"type": "int"}}, ["weights: type='int': expected 'float'"]),
        ({"weights": {"strategy": "group"}}, ["weights: strategy='group': expected 'channel' or 'tensor' or 'block'"]),
        ({"weights": {"strategy": "block"}}, ["weights: block_structure is missing: expected a list of two"]),
        ({"activations": {"dynamic": "local"}}, ["input_activations: dynamic='local': expected true or false"]),
        ({**PACKED, "weights": GROUPS | {"num_bits": 3}}, ["weights: num_bits=3: expected 4 or 8"]),
        ({**PACKED, "weights": GROUPS | {"type": "float"}}, ["weights: type='float': expected 'int'"]),
        ({**PACKED, "weights": GROUPS | {"strategy": "block"}}, ["weights: strategy='block'", "'group'"]),
        ({**PACKED, "weights": GROUPS | {"strategy": "tensor"}}, ["weights: strategy='tensor'", "symmetric=false"]),
        ({**PACKED, "weights": GROUPS | {"group_size": None}}, ["weights: group_size is missing"]),
        ({**PACKED, "weights": GROUPS | {"actorder": "columns"}}, ["weights: actorder='columns'"]),
        ({**PACKED, "weights": GROUPS, "activations": {"dynamic": False}}, ["input_activations: dynamic=False"]),
        ({"format": "nvfp4-pack-quantized", "weights": {"group_size": 16}}, ["weights: num_bits=8: expected 4"]),
        (
            {"format": "nvfp4-pack-quantized", "weights": FP4 | {"group_size": 32}},
            ["weights: group_size=32: expected 16"],
        ),
        (
            {"format": "mxfp4-pack-quantized", "weights": FP4 | {"type": "int"}},
            ["weights: type='int': expected 'float'"],
        ),
        ({"format": "mxfp8-quantized", "weights": {"group_size": 16}}, ["weights: group_size=16: expected 32"]),
        (MODELOPT | {"quant_algo": "W4A8_AWQ"}, ["quant_algo='W4A8_AWQ': expected 'FP8'", "'NVFP4'"]),
        (MODELOPT | {"group_size": 32}, ["group_size=32: expected 16"]),
        ({"format": "int-quantized", "weights": GROUPS}, ["weights: num_bits=4: expected 8"]),
        ({"format": "int-quantized", "weights": INT8 | {"symmetric": False}}, ["weights: symmetric=False"]),
        (GPTQ | {"bits": 3}, ["bits=3: expected 4 or 8"]),
        (GPTQ | {"group_size": 0}, ["group_size=0"]),
        (GPTQ | {"checkpoint_format": "marlin"}, ["checkpoint_format='marlin': expected 'gptq' or 'gptq_v2'"]),
        (GPTQ | {"is_marlin_format": True}, ["is_marlin_format=True"]),
        (GPTQ | {"pack_dtype": "int16"}, ["pack_dtype='int16': expected 'int32'"]),
        (GPTQ | {"rotation": "hadamard"}, ["rotation='hadamard': expected no value"]),
        (GPTQ | {"activation": {"bits": 4}}, ["activation={'bits': 4}", "quantized activations"]),
        (AWQ | {"version": "gemv"}, ["version='gemv': expected 'gemm'"]),
        (AWQ | {"bits": 8}, ["bits=8: expected 4"]),
    ],
)
def test_unsupported_quantization_schemes_are_refused_by_name(changed: dict[str, Any], fragments: list[str]) -> None:
    with pytest.raises(InvalidCheckpoint) as raised:
        parse_quantization(config(**changed))
    for fragment in ("config.json", *fragments):
        assert fragment in str(raised.value)
