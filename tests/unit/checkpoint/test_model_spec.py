"""What raycore takes a checkpoint's config.json and generation_config.json to mean."""

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from model_specs import spec_of

from raycore.checkpoint.model_spec import load_model_spec
from raycore.demo import DEMO_MODEL_DIR
from raycore.errors import InvalidCheckpoint, InvalidConfig
from raycore.json_fields import JsonFields
from raycore.models.llama import LLAMA
from raycore.models.mixers.delta import DeltaSpec
from raycore.models.mixers.kda import KdaSpec
from raycore.models.mixers.latent import LatentHeads
from raycore.models.mixers.mamba2 import Mamba2Spec
from raycore.models.mixers.short_conv import ShortConvSpec
from raycore.models.quantization import Quantization
from raycore.models.registry import FAMILIES, find_family, find_own_family
from raycore.models.rotation import RopeScaling, Rotation
from raycore.models.spec import ClampedSwiglu, ModelSpec, QueryScale
from raycore.parts.experts.models import ExpertChoice, ExpertNames, MoeSpec, SharedExperts

HYBRID = "GraniteMoeHybridForCausalLM"
LFM2, KIMI_LINEAR = "Lfm2ForCausalLM", "KimiLinearForCausalLM"
LLAMA31_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_the_demo_models_spec_is_that_of_its_config() -> None:
    spec = load_model_spec(DEMO_MODEL_DIR)
    assert (spec.architecture, spec.model_type, spec.dtype) == ("LlamaForCausalLM", "llama", "bfloat16")
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 4, 4, 32)
    assert spec.tie_word_embeddings
    assert spec.eos_token_ids == [0, 3], "generation_config.json's, not config.json's"
    assert spec.bos_token_id == 0


def test_configs_of_transformers_4_and_5_give_the_same_spec(tmp_path: Path) -> None:
    version4 = spec_of(
        tmp_path,
        torch_dtype="bfloat16",
        rope_theta=500000.0,
        rope_scaling={"rope_type": "llama3", **LLAMA31_SCALING},
    )
    version5 = spec_of(
        tmp_path, dtype="bfloat16", rope_parameters={"rope_theta": 500000.0, "rope_type": "llama3", **LLAMA31_SCALING}
    )
    assert version4 == version5
    assert version4.dtype == "bfloat16"
    assert version4.rotations[0].theta == 500000.0
    assert version4.rotations[0].scaling == RopeScaling("llama3", 8.0, 8192, 1.0, 4.0)


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("LlamaForCausalLM", (32000, 11008, 32, 128, 2048, [2])),
        ("MistralForCausalLM", (32000, 14336, 8, 128, 131072, [2])),
        ("Qwen2ForCausalLM", (151936, 22016, 32, 128, 32768, [])),
        ("Qwen3ForCausalLM", (151936, 22016, 32, 128, 32768, [])),
    ],
)
def test_absent_config_keys_have_the_defaults_of_transformers(
    tmp_path: Path, architecture: str, expected: tuple[Any, ...]
) -> None:
    spec = spec_of(tmp_path, architecture)
    assert (
        spec.vocab_size,
        spec.intermediate_size,
        spec.num_kv_heads,
        spec.head_dim,
        spec.max_position_embeddings,
        spec.eos_token_ids,
    ) == expected
    assert (spec.hidden_size, spec.num_layers, spec.num_heads) == (4096, 32, 32)
    assert (spec.rms_norm_eps, spec.rotations[0]) == (1e-6, Rotation(10000.0))
    assert not spec.tie_word_embeddings
    assert spec.dtype == "float32"


def test_the_text_model_of_a_multimodal_checkpoint_is_read(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "num_hidden_layers": 7, "eos_token_id": 5, "dtype": "float32"}
    outer = {
        "text_config": text,
        "vision_config": {"num_hidden_layers": 3, "image_size": 896, "patch_size": 14},
        "eos_token_id": [1, 106],
    }
    spec = spec_of(tmp_path, "Gemma3ForConditionalGeneration", **outer, torch_dtype="bfloat16", dtype="bfloat16")
    assert (spec.num_layers, spec.vocab_size, spec.dtype) == (7, 262208, "bfloat16")
    assert (spec.eos_token_ids, spec.tie_word_embeddings) == ([1, 106], True)
    assert spec_of(tmp_path, "Gemma3ForConditionalGeneration", {"eos_token_id": 9}, **outer).eos_token_ids == [9]
    with pytest.raises(InvalidCheckpoint, match="text_config: model_type='llama': expected one of gemma3_text"):
        spec_of(tmp_path, "Gemma3ForConditionalGeneration", text_config={"model_type": "llama"})


def test_queries_of_ministral3_grow(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "Ministral3ForCausalLM")
    assert spec.query_scale == QueryScale(0.1, 16384)
    assert spec.rotations[0] is not None
    assert spec.rotations[0].scaling == RopeScaling("yarn", 16.0, 16384, attention_factor=1.0)
    plain = {"rope_type": "default", "rope_theta": 1e6}
    text = {"model_type": "ministral3", "rope_parameters": plain}
    assert spec_of(tmp_path, "Mistral3ForConditionalGeneration", text_config=text).query_scale is None
    off = plain | {"llama_4_scaling_beta": 0, "original_max_position_embeddings": 16384}
    assert spec_of(tmp_path, "Ministral3ForCausalLM", rope_parameters=off).query_scale is None
    assert spec_of(tmp_path, "Mistral3ForConditionalGeneration", text_config={}).vocab_size == 32000


def test_alpha_of_hunyuan_enlarges_the_base(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "rope_theta": 10.0}
    spec = spec_of(tmp_path, "HunYuanDenseV1ForCausalLM", **sizes, rope_scaling={"type": "dynamic", "alpha": 128})
    assert spec.rotations[0] == Rotation(pytest.approx(10 * 128 ** (16 / 14)))
    off = {"type": "linear", "factor": 2.0, "alpha": 0}
    scaled = spec_of(tmp_path, "HunYuanDenseV1ForCausalLM", **sizes, rope_scaling=off).rotations[0]
    assert scaled == Rotation(10.0, RopeScaling("linear", 2.0))
    for without in ({"factor": 2.0}, off):
        with pytest.raises(InvalidCheckpoint, match="type='dynamic': expected default, linear"):
            spec_of(tmp_path, "HunYuanDenseV1ForCausalLM", **sizes, rope_scaling=without | {"type": "dynamic"})


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
def test_the_long_rope_factors_of_phi3_are_read(tmp_path: Path, name: str) -> None:
    factors = {"short_factor": [1, 1.5, 2.0], "long_factor": [2.0, 3.0, 4.0]}
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "max_position_embeddings": 131072}
    config = sizes | {"rope_scaling": {"type": name, **factors}, "partial_rotary_factor": 0.75}
    rotation = spec_of(tmp_path, "Phi3ForCausalLM", **config).rotations[0]
    assert rotation is not None
    assert (rotation.fraction, rotation.scaling) == (
        0.75,
        RopeScaling(
            "longrope",
            32.0,
            4096,
            attention_factor=pytest.approx(math.sqrt(1 + 5 / 12)),  # pyright: ignore
            short_factors=(1.0, 1.5, 2.0),
            long_factors=(2.0, 3.0, 4.0),
        ),
    )
    changed = {"rope_scaling": {"type": name, **factors, "long_factor": [2.0, 3.0]}}
    with pytest.raises(InvalidCheckpoint, match=r"long_factor=.*: expected a list of 3 positive numbers"):
        spec_of(tmp_path, "Phi3ForCausalLM", **config | changed)


def test_head_dim_is_derived_except_for_qwen3(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    assert spec_of(tmp_path, **sizes).head_dim == 16
    assert spec_of(tmp_path, "MistralForCausalLM", **sizes, head_dim=None).head_dim == 16
    assert spec_of(tmp_path, "MistralForCausalLM", **sizes, head_dim=32).head_dim == 32
    assert spec_of(tmp_path, "Qwen3ForCausalLM", **sizes).head_dim == 128


def test_kv_heads_that_are_null_are_as_many_as_heads(tmp_path: Path) -> None:
    assert spec_of(tmp_path, "MistralForCausalLM", num_key_value_heads=None).num_kv_heads == 32


@pytest.mark.parametrize(
    ("architecture", "config", "expected"),
    [
        ("LlamaForCausalLM", {}, (False, False, False, None)),
        ("LlamaForCausalLM", {"attention_bias": True}, (True, True, False, None)),
        ("LlamaForCausalLM", {"mlp_bias": True}, (False, False, True, None)),
        ("MistralForCausalLM", {"attention_bias": True, "mlp_bias": True}, (False, False, False, None)),
        ("Qwen2ForCausalLM", {"attention_bias": True}, (True, False, False, None)),
        ("Qwen3ForCausalLM", {}, (False, False, False, "heads")),
        ("Qwen3ForCausalLM", {"attention_bias": True}, (True, True, False, "heads")),
    ],
)
def test_biases_and_query_norms_follow_the_config(
    tmp_path: Path, architecture: str, config: dict[str, Any], expected: tuple[object, ...]
) -> None:
    spec = spec_of(tmp_path, architecture, **config)
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.qk_norm) == expected


@pytest.mark.parametrize(
    ("architecture", "config", "expected"),
    [
        ("LlamaForCausalLM", {}, (1.0, None)),
        ("GraniteForCausalLM", {"logits_scaling": 4.0}, (0.25, None)),
        ("Gemma2ForCausalLM", {"final_logit_softcapping": 4.0}, (1.0, 4.0)),
        ("VaultGemmaForCausalLM", {}, (1.0, 30.0)),
        ("VaultGemmaForCausalLM", {"final_logit_softcapping": None}, (1.0, None)),
    ],
)
def test_what_logits_are_multiplied_by_and_capped_at_follows_the_config(
    tmp_path: Path, architecture: str, config: dict[str, Any], expected: tuple[float, float | None]
) -> None:
    spec = spec_of(tmp_path, architecture, **config)
    assert (spec.logits_multiplier, spec.logits_softcap) == expected


@pytest.mark.parametrize(
    ("architecture", "config", "expected"),
    [
        ("LlamaForCausalLM", {}, (1.0, False, False)),
        ("GraniteForCausalLM", {"embedding_multiplier": 12.1}, (12.1, False, True)),
        ("Gemma2ForCausalLM", {"hidden_size": 48}, (48**0.5, True, False)),
        ("AfmoeForCausalLM", {"hidden_size": 48, "mup_enabled": True}, (48**0.5, False, True)),
    ],
)
def test_what_embeddings_are_multiplied_by_follows_the_config(
    tmp_path: Path, architecture: str, config: dict[str, Any], expected: tuple[float, bool, bool]
) -> None:
    spec = spec_of(tmp_path, architecture, **config)
    assert (spec.embedding_multiplier, spec.rounds_embedding_multiplier, spec.scales_given_embeddings) == expected


SLIDING = {"use_sliding_window": True, "sliding_window": 8}
TYPES = ["full_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("architecture", "config", "expected"),
    [
        ("LlamaForCausalLM", {"sliding_window": 8}, [None, None, None]),
        ("MistralForCausalLM", {}, [4096, 4096, 4096]),
        ("MistralForCausalLM", {"sliding_window": None}, [None, None, None]),
        ("MistralForCausalLM", {"sliding_window": 8, "layer_types": ["sliding_attention"] * 3}, [8, 8, 8]),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "layer_types": TYPES}, [None, None, None]),
        ("Qwen2ForCausalLM", SLIDING, [None, None, None]),
        ("Qwen2ForCausalLM", SLIDING | {"max_window_layers": 1}, [None, 8, 8]),
        ("Qwen3ForCausalLM", SLIDING | {"max_window_layers": 0}, [8, 8, 8]),
        ("Qwen3ForCausalLM", SLIDING | {"max_window_layers": 0, "layer_types": TYPES}, [None, 8, None]),
        ("Qwen3ForCausalLM", SLIDING | {"sliding_window": None, "layer_types": TYPES}, [None, None, None]),
    ],
)
def test_sliding_windows_of_layers_follow_the_config(
    tmp_path: Path, architecture: str, config: dict[str, Any], expected: list[int | None]
) -> None:
    assert spec_of(tmp_path, architecture, num_hidden_layers=3, **config).layer_windows == expected


def test_linear_rope_scaling_is_read_under_its_old_key(tmp_path: Path) -> None:
    rotation = spec_of(tmp_path, rope_scaling={"type": "linear", "factor": 2}).rotations[0]
    assert rotation == Rotation(10000.0, RopeScaling("linear", 2.0))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, 0.1 * math.log(4.0) + 1.0),
        ({"attention_factor": 0.5}, 0.5),
        ({"mscale": 2.0, "mscale_all_dim": 1.0}, (0.2 * math.log(4.0) + 1.0) / (0.1 * math.log(4.0) + 1.0)),
        ({"mscale": 2.0}, 0.1 * math.log(4.0) + 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 0.0}, 0.1 * math.log(4.0) + 1.0),
        ({"mscale": 0, "mscale_all_dim": 1.0}, 0.1 * math.log(4.0) + 1.0),
    ],
)
def test_the_yarn_attention_factor_follows_the_config(tmp_path: Path, given: dict[str, float], expected: float) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, **given}
    scaling = spec_of(tmp_path, "Qwen3ForCausalLM", rope_scaling=rope).rotations[0].scaling
    assert scaling is not None
    assert scaling.attention_factor == pytest.approx(expected)
    assert (scaling.beta_fast, scaling.beta_slow, scaling.truncate) == (32.0, 1.0, True)


def test_yarn_stretches_the_positions_that_may_be_used(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert spec_of(tmp_path, max_position_embeddings=40960, rope_scaling=rope).max_length == 131072
    assert spec_of(tmp_path, max_position_embeddings=200000, rope_scaling=rope).max_length == 200000
    llama3 = {"rope_type": "llama3", **LLAMA31_SCALING}
    assert spec_of(tmp_path, max_position_embeddings=131072, rope_scaling=llama3).max_length == 131072


def test_original_positions_default_to_the_models_and_the_top_level_wins(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0}
    scaling = spec_of(tmp_path, max_position_embeddings=1000, rope_scaling=rope).rotations[0].scaling
    assert scaling is not None
    assert scaling.original_max_position_embeddings == 1000
    rope["original_max_position_embeddings"] = 500
    scaling = spec_of(tmp_path, original_max_position_embeddings=250, rope_scaling=rope).rotations[0].scaling
    assert scaling is not None
    assert scaling.original_max_position_embeddings == 250


def test_each_layer_type_has_its_own_rope_parameters(tmp_path: Path) -> None:
    plain = {"rope_theta": 5000.0, "rope_type": "default"}
    only = spec_of(tmp_path, rope_parameters={"full_attention": plain, "sliding_attention": None})
    assert only.rotations[0] == Rotation(5000.0)
    both = {"full_attention": plain, "sliding_attention": plain}
    assert spec_of(tmp_path, rope_parameters=both).rotations[0] == Rotation(5000.0)
    with pytest.raises(InvalidCheckpoint, match=r"rope_parameters.*all layer types"):
        spec_of(tmp_path, rope_parameters={"full_attention": plain, "sliding_attention": plain | {"rope_theta": 1.0}})


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 5}, None, [5]),
        ({"eos_token_id": [5, 6]}, None, [5, 6]),
        ({"eos_token_id": 5}, {"eos_token_id": 7}, [7]),
        ({"eos_token_id": 5}, {"eos_token_id": [7, 8]}, [7, 8]),
        ({"eos_token_id": 5}, {"eos_token_id": None}, [5]),
        ({"eos_token_id": 5}, {"bos_token_id": 1}, [5]),
        ({"eos_token_id": None}, None, []),
    ],
)
def test_end_of_sequence_ids_come_from_generation_config_then_config(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None, expected: list[int]
) -> None:
    assert spec_of(tmp_path, generation=generation, **config).eos_token_ids == expected


def test_generation_defaults_are_those_of_generation_config(tmp_path: Path) -> None:
    generation = {"temperature": 0.6, "top_k": 20, "top_p": None, "do_sample": True, "max_new_tokens": 64}
    spec = spec_of(tmp_path, generation=generation)
    assert spec.generation_defaults == {"temperature": 0.6, "top_k": 20, "max_new_tokens": 64}


@pytest.mark.parametrize(
    ("config", "fragments"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["architectures=['GPT2LMHeadModel']", "Qwen3ForCausalLM"]),
        ({"architectures": None}, ["architectures is missing", "LlamaForCausalLM"]),
        ({"hidden_act": "relu"}, ["hidden_act='relu'", "silu"]),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            ["quantization_config", "awq", "compressed-tensors"],
        ),
        ({"partial_rotary_factor": 1.5}, ["partial_rotary_factor=1.5"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["rope_scaling", "type='dynamic'", "yarn"]),
        ({"rope_parameters": {"rope_type": "longrope"}}, ["rope_parameters", "short_factor is missing", "64"]),
        ({"rope_parameters": {"rope_type": "axial"}}, ["rope_type='axial'", "proportional"]),
        ({"rope_scaling": {"type": "linear"}}, ["rope_scaling", "factor is missing"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["low_freq_factor is missing"]),
        ({"rope_scaling": "linear"}, ["rope_scaling='linear'", "an object"]),
        ({"torch_dtype": "float8_e4m3fn"}, ["torch_dtype='float8_e4m3fn'"]),
        ({"hidden_size": None}, ["hidden_size is missing"]),
        ({"hidden_size": "4096"}, ["hidden_size='4096'", "an integer"]),
        ({"hidden_size": 100, "num_attention_heads": 3}, ["hidden_size=100", "num_attention_heads=3"]),
        ({"head_dim": 33}, ["head_dim=33", "even"]),
        ({"num_attention_heads": 8, "num_key_value_heads": 3}, ["num_key_value_heads=3", "num_attention_heads=8"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers=0", "at least 1"]),
        ({"rms_norm_eps": -1.0}, ["rms_norm_eps=-1.0", "positive"]),
        ({"tie_word_embeddings": "no"}, ["tie_word_embeddings='no'", "true or false"]),
        ({"eos_token_id": [2, "</s>"]}, ["eos_token_id", "token ids"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id='</s>'"]),
    ],
)
def test_unsupported_model_settings_are_refused_by_name(
    tmp_path: Path, config: dict[str, Any], fragments: list[str]
) -> None:
    with pytest.raises(InvalidCheckpoint) as raised:
        spec_of(tmp_path, **config)
    for fragment in [str(tmp_path / "config.json"), *fragments]:
        assert fragment in str(raised.value)


def test_layer_types_that_contradict_the_family_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpoint, match="layer_types"):
        spec_of(tmp_path, "MistralForCausalLM", num_hidden_layers=3, layer_types=TYPES)
    with pytest.raises(InvalidCheckpoint, match=r"layer_types.*4"):
        spec_of(tmp_path, "Qwen2ForCausalLM", num_hidden_layers=4, layer_types=TYPES, **SLIDING)


def test_modelopts_own_file_says_what_is_quantized(tmp_path: Path) -> None:
    def found(**fields: Any) -> Quantization | None:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": fields}))
        return spec_of(tmp_path).quantization

    weights = found(quant_algo="FP8")
    assert weights is not None
    assert weights.method == "modelopt"
    assert found(quant_algo=None, kv_cache_quant_algo="FP8") is None, "only the cache is quantized"
    with pytest.raises(InvalidCheckpoint, match=r"hf_quant_config\.json, quantization: quant_algo='W4A8_AWQ'"):
        found(quant_algo="W4A8_AWQ")
    with pytest.raises(InvalidCheckpoint, match=r"hf_quant_config\.json, quantization: quant_algo is missing"):
        found()


def test_config_files_that_cant_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpoint, match="nowhere isn't a directory"):
        load_model_spec(tmp_path / "nowhere")
    with pytest.raises(InvalidCheckpoint, match=r"has no config\.json: give the directory"):
        load_model_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidCheckpoint, match=r"config\.json isn't valid JSON"):
        load_model_spec(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InvalidCheckpoint, match=r"config\.json holds a list"):
        load_model_spec(tmp_path)
    (tmp_path / "generation_config.json").write_text("nonsense")
    with pytest.raises(InvalidCheckpoint, match=r"generation_config\.json isn't valid JSON"):
        spec_of(tmp_path)


def test_tensor_parallel_sizes_must_divide_heads_and_the_intermediate_size(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, num_attention_heads=8, num_key_value_heads=2, intermediate_size=48, hidden_size=64)
    for tp_size, kv_heads in ((1, 2), (2, 1), (4, 1), (8, 1)):
        spec.check_tensor_parallel(tp_size)
        assert spec.kv_heads_per_rank(tp_size) == kv_heads
    with pytest.raises(InvalidConfig, match=r"tensor_parallel_size=3.*num_attention_heads=8.*\[1, 2, 4, 8\]"):
        spec.check_tensor_parallel(3)
    with pytest.raises(InvalidConfig, match=r"tensor_parallel_size=8.*intermediate_size=44.*\[1, 2, 4\]"):
        msgspec.structs.replace(spec, intermediate_size=44).check_tensor_parallel(8)
    with pytest.raises(InvalidConfig, match=r"tensor_parallel_size=2.*num_key_value_heads=3.*\[1, 3, 6\]"):
        msgspec.structs.replace(spec, num_heads=6, num_kv_heads=3).check_tensor_parallel(2)


def test_a_model_spec_is_equal_after_encoding_and_decoding(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, rope_scaling={"rope_type": "llama3", **LLAMA31_SCALING}, generation={"top_k": 5})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=ModelSpec) == spec


NORMALIZED = ExpertChoice(is_normalized=True)
MOE_SIZES = {"num_hidden_layers": 4, "num_experts_per_tok": 2}


def test_the_experts_of_mixtral_are_read(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "MixtralForCausalLM")
    assert spec.moe == MoeSpec(
        8,
        2,
        14336,
        [True] * 32,
        NORMALIZED,
        names=ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
        size_key="intermediate_size",
    )
    assert (spec.rms_norm_eps, spec.rotations[0].theta, spec.num_kv_heads) == (1e-5, 1e6, 8)
    assert spec.layer_windows == [None] * 32
    assert spec_of(tmp_path, "MixtralForCausalLM", **MOE_SIZES, sliding_window=7).layer_windows == [7] * 4


def test_the_experts_of_qwen3_moe_are_read(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "Qwen3MoeForCausalLM")
    assert spec.moe == MoeSpec(128, 8, 768, [True] * 24)
    assert (spec.hidden_size, spec.num_kv_heads, spec.head_dim, spec.qk_norm) == (2048, 4, 64, "heads")
    given = {"num_experts": 6, "moe_intermediate_size": 16, "norm_topk_prob": True, **MOE_SIZES}
    assert spec_of(tmp_path, "Qwen3MoeForCausalLM", **given).moe == MoeSpec(6, 2, 16, [True] * 4, NORMALIZED)
    renamed = {key: value for key, value in given.items() if key != "num_experts"} | {"num_local_experts": 6}
    assert spec_of(tmp_path, "Qwen3MoeForCausalLM", **renamed).moe == MoeSpec(6, 2, 16, [True] * 4, NORMALIZED)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"mlp_only_layers": [0, 2]}, [False, True, False, True]),
        ({"decoder_sparse_step": 2}, [False, True, False, True]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, [False, False, False, True]),
    ],
)
def test_dense_layers_among_sparse_layers_are_read(
    tmp_path: Path, config: dict[str, Any], expected: list[bool]
) -> None:
    moe = spec_of(tmp_path, "Qwen3MoeForCausalLM", **MOE_SIZES, **config).moe
    assert moe is not None
    assert moe.sparse_layers == expected


def test_a_model_without_sparse_layers_has_no_experts(tmp_path: Path) -> None:
    assert spec_of(tmp_path, "Qwen3MoeForCausalLM", **MOE_SIZES, mlp_only_layers=[0, 1, 2, 3]).moe is None
    assert spec_of(tmp_path, "Qwen3ForCausalLM", num_experts=8).moe is None


def test_the_sliding_window_of_qwen3_moe_is_that_of_every_layer(tmp_path: Path) -> None:
    window = {"sliding_window": 9, "max_window_layers": 3}
    assert spec_of(tmp_path, "Qwen3MoeForCausalLM", **MOE_SIZES, **window).layer_windows == [None] * 4
    used = spec_of(tmp_path, "Qwen3MoeForCausalLM", **MOE_SIZES, **window, use_sliding_window=True)
    assert used.layer_windows == [9] * 4


def test_more_experts_per_token_than_experts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpoint, match=r"num_experts_per_tok=9.*at most the model's 8 experts"):
        spec_of(tmp_path, "MixtralForCausalLM", num_experts_per_tok=9)


def test_expert_parallel_ranks_need_not_divide_the_experts_inner_size(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "Qwen3MoeForCausalLM", **MOE_SIZES, moe_intermediate_size=7, intermediate_size=9)
    with pytest.raises(InvalidConfig, match="moe_intermediate_size=7"):
        spec.check_tensor_parallel(2)
    spec.check_tensor_parallel(2, expert_parallel=True)


GLM_SIZES = {"num_hidden_layers": 3, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 6}
GLM_GROUPS = {"n_group": 4, "topk_group": 2, "n_shared_experts": 2, "routed_scaling_factor": 2.5}


def test_the_experts_of_glm4_moe_are_read(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "Glm4MoeForCausalLM", **GLM_SIZES, **GLM_GROUPS, head_dim=128, use_qk_norm=True)
    router = ExpertChoice(
        "sigmoid",
        is_normalized=True,
        has_correction=True,
        num_groups=4,
        num_chosen_groups=2,
        scaling=2.5,
        in_float32=True,
    )
    shared = SharedExperts(12, size_key="moe_intermediate_size times n_shared_experts")
    assert spec.moe == MoeSpec(8, 3, 6, [False, True, True], router, shared)
    assert (spec.qk_norm, spec.qkv_bias, spec.num_predictors) == ("heads", False, 1)
    assert spec.rotations == [Rotation(10000.0, fraction=0.5)] * 3
    with pytest.raises(InvalidConfig, match=r"tensor_parallel_size=8.*moe_intermediate_size times n_shared_experts=12"):
        spec.check_tensor_parallel(8, expert_parallel=True)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"n_group": 3}, "n_group=3.*a divisor of the model's 8 experts"),
        ({"n_group": 4, "topk_group": 5}, "topk_group=5.*from 2.*to n_group=4"),
        ({"n_group": 4, "topk_group": 1}, "topk_group=1.*from 2.*to n_group=4"),
    ],
)
def test_unsupported_routers_are_refused_by_name(tmp_path: Path, config: dict[str, Any], expected: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=expected):
        spec_of(tmp_path, "Glm4MoeForCausalLM", **GLM_SIZES, **config)


def test_the_experts_of_qwen2_moe_are_read(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "Qwen2MoeForCausalLM")
    shared, names = SharedExperts(5632, has_gate=True), ExpertNames(shared="shared_expert")
    assert spec.moe == MoeSpec(60, 4, 1408, [True] * 24, shared=shared, names=names)
    assert spec.qkv_bias
    assert spec.layer_windows == [None] * 24
    window = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3}
    assert spec_of(tmp_path, "Qwen2MoeForCausalLM", **MOE_SIZES, **window).layer_windows == [9, None, 9, None]


def test_the_partial_rotation_of_minimax_m2_is_read(tmp_path: Path) -> None:
    rotation = Rotation(5e6, fraction=0.5)
    assert spec_of(tmp_path, "MiniMaxM2ForCausalLM", rotary_dim=64).rotations == [rotation] * 62
    rope = {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}
    assert spec_of(tmp_path, "MiniMaxM2ForCausalLM", rope_parameters=rope).rotations == [rotation] * 62
    with pytest.raises(InvalidCheckpoint, match=r"rotary_dim=129.*at most head_dim=128"):
        spec_of(tmp_path, "MiniMaxM2ForCausalLM", rotary_dim=129)


def test_the_spec_of_gpt_oss_has_its_experts_gate_windows_and_yarn(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "GptOssForCausalLM", num_hidden_layers=3, num_local_experts=32, swiglu_limit=5.0)
    names, router = ExpertNames(router="router"), ExpertChoice("softmax_of_chosen", has_bias=True)
    experts = MoeSpec(
        32, 4, 2880, [True] * 3, router, has_bias=True, names=names, is_interleaved=True, is_transposed=True
    )
    assert spec.moe == msgspec.structs.replace(experts, size_key="intermediate_size")
    assert spec.gate == ClampedSwiglu(1.702, 5.0)
    assert spec.layer_windows == [128, None, 128]
    assert (spec.qkv_bias, spec.o_bias, spec.sinks) == (True, True, True)
    (rotation,) = set(spec.rotations)
    assert rotation is not None
    scaling = RopeScaling("yarn", 32.0, 4096, attention_factor=0.1 * math.log(32) + 1, truncate=False)
    assert (rotation.theta, rotation.scaling) == (150000.0, scaling)


def test_the_experts_of_minimax_m2_are_read(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "MiniMaxM2ForCausalLM", num_hidden_layers=2)
    names = ExpertNames("block_sparse_moe", "w1", "w3", "w2", correction="e_score_correction_bias")
    router = ExpertChoice("sigmoid", is_normalized=True, has_correction=True, in_float32=True)
    expected = MoeSpec(256, 8, 1536, [True] * 2, router, names=names, size_key="intermediate_size")
    assert (spec.moe, spec.qk_norm) == (expected, "width")
    with pytest.raises(InvalidCheckpoint, match=r"scoring_func='softmax'.*sigmoid"):
        spec_of(tmp_path, "MiniMaxM2ForCausalLM", scoring_func="softmax")


def test_layers_of_qwen3_next_keep_states_and_attention_has_gates(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "Qwen3NextForCausalLM", num_hidden_layers=8)
    assert spec.state == DeltaSpec(
        layers=[True, True, True, False] * 2,
        num_k_heads=16,
        num_v_heads=32,
        k_dim=128,
        v_dim=128,
        conv_size=4,
        is_interleaved=True,
    )
    assert (spec.attention_gate, spec.norm_offset, spec.qk_norm) == ("query_rows", 1.0, "heads")
    assert spec.rotations[3] == Rotation(10000.0, fraction=0.25)
    assert spec.moe is not None
    assert (spec.moe.num_experts, spec.moe.num_experts_per_tok, spec.moe.router.is_normalized) == (512, 10, True)
    assert [mixer.keeps_state for mixer in spec.mixers[:4]] == [True, True, True, False]
    dense = spec_of(tmp_path, "Qwen3_5ForCausalLM", num_hidden_layers=4, full_attention_interval=2)
    assert dense.state is not None
    assert (dense.state.layers, dense.state.is_interleaved, dense.moe) == ([True, False] * 2, False, None)
    text = {"model_type": "qwen3_5_moe_text", "layer_types": ["linear_attention", "full_attention"]}
    outer = spec_of(tmp_path, "Qwen3_5MoeForConditionalGeneration", text_config={**text, "num_hidden_layers": 2})
    assert outer.moe is not None
    assert (outer.moe.num_experts, outer.names.embedding, outer.tie_word_embeddings) == (
        256,
        "model.language_model.embed_tokens.weight",
        False,
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"layer_types": ["linear_attention"] * 4}, "one of these at least"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "linear_attention or full_attention"),
        ({"linear_num_value_heads": 24}, "linear_num_value_heads=24: expected a multiple of linear_num_key_heads=16"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu': expected silu"),
    ],
)
def test_what_layers_with_states_need_is_checked(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=message):
        spec_of(tmp_path, "Qwen3_5ForCausalLM", num_hidden_layers=4, **config)


def test_kimi_linear_is_read_as_it_was_published_and_as_transformers_saves_it(tmp_path: Path) -> None:
    states = {"num_heads": 8, "head_dim": 64, "short_conv_kernel_size": 3, "full_attn_layers": [2, 5]}
    sizes = {"num_hidden_layers": 5, "num_experts": 64, "tie_word_embeddings": False}
    published: dict[str, Any] = {"linear_attn_config": states, "first_k_dense_replace": 2, "num_experts_per_token": 4}
    published |= {"num_shared_experts": 2, "num_expert_group": 4, "topk_group": 2, "moe_renormalize": False}
    published |= {"model_max_length": 4096, "head_dim": 72, "num_key_value_heads": 32, "moe_layer_freq": 1}
    spec = spec_of(tmp_path, KIMI_LINEAR, **sizes, **published)
    full = [False, True, False, False, True]
    assert spec.state == KdaSpec([not each for each in full], num_v_heads=8, k_dim=64, v_dim=64, conv_size=3)
    assert spec.latent == LatentHeads(512, 128, 64, 128)
    assert (spec.rotations, spec.attention_scale, spec.head_dim) == ([None] * 5, 192**-0.5, 64)
    assert (spec.max_position_embeddings, spec.rms_norm_eps) == (4096, 1e-5)
    router = ExpertChoice("sigmoid", False, True, num_groups=4, num_chosen_groups=2, scaling=2.446, in_float32=True)
    assert spec.moe is not None
    assert (spec.moe.sparse_layers, spec.moe.num_experts_per_tok) == ([False] * 2 + [True] * 3, 4)
    assert (spec.moe.router, spec.moe.names.block) == (router, "block_sparse_moe")
    assert spec.moe.shared is not None
    assert (spec.moe.shared.intermediate_size, spec.names.down) == (2048, "mlp.down_proj")
    of_states = {"linear_num_heads": 8, "linear_head_dim": 64, "linear_conv_kernel_dim": 3}
    layer_types = ["full_attention" if each else "linear_attention" for each in full]
    saved = published | of_states | {"layer_types": layer_types, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 3}
    del saved["linear_attn_config"], saved["first_k_dense_replace"]
    same = spec_of(tmp_path, KIMI_LINEAR, **sizes, **saved)
    assert same.names.down == "block_sparse_moe.down_proj"
    assert msgspec.structs.replace(same, names=spec.names) == spec
    bare = spec_of(tmp_path, KIMI_LINEAR, num_hidden_layers=9)
    assert bare.state is not None
    assert [layer for layer, is_state in enumerate(bare.state.layers) if not is_state] == [4, 8]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"mla_use_nope": False}, "mla_use_nope=False: expected true, because latent attention with rotation"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func='softmax': expected sigmoid"),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2: expected 1"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu': expected silu"),
        ({"linear_attn_config": {"full_attn_layers": []}}, "one of these at least"),
        ({"linear_attn_config": {"short_conv_kernel_size": 1}}, "linear_conv_kernel_dim=1: expected an integer"),
    ],
)
def test_what_kimi_linear_needs_is_checked(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=message):
        spec_of(tmp_path, KIMI_LINEAR, num_hidden_layers=6, **config)


def test_key_heads_of_states_are_divided_over_tensor_parallel_ranks(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 4, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
    spec = spec_of(tmp_path, "Qwen3_5ForCausalLM", **sizes)
    spec.check_tensor_parallel(4)
    with pytest.raises(InvalidConfig, match=r"linear_num_key_heads=4: choose one of \[1, 2, 4\]"):
        spec.check_tensor_parallel(8)


def test_convolutions_of_lfm2_are_where_config_json_says(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, LFM2, num_hidden_layers=3, full_attn_idxs=[1], block_ff_dim=1200, norm_eps=1e-3)
    assert spec.state == ShortConvSpec([True, False, True], num_channels=2560, conv_size=3, has_bias=False)
    assert spec == spec_of(
        tmp_path,
        LFM2,
        num_hidden_layers=3,
        layer_types=["conv", "full_attention", "conv"],
        intermediate_size=1024,
        block_auto_adjust_ff_dim=False,
        rms_norm_eps=1e-3,
    )
    assert (spec.qk_norm, spec.tie_word_embeddings, spec.rotations[1]) == ("heads", True, Rotation(1e6))
    assert spec_of(tmp_path, LFM2, intermediate_size=1200, block_ffn_dim_multiplier=None).intermediate_size == 800
    assert spec_of(tmp_path, LFM2, tie_embedding=False).state is None


def test_the_experts_of_lfm2_are_read(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1}
    spec = spec_of(tmp_path, "Lfm2MoeForCausalLM", **sizes, use_expert_bias=False, routed_scaling_factor=2.0)
    names = ExpertNames("feed_forward", "w1", "w3", "w2", correction="expert_bias")
    router = ExpertChoice("sigmoid", is_normalized=True, least_sum=1e-6, scaling=2.0)
    assert spec.moe == MoeSpec(32, 4, 1792, [False, True, True], router, names=names)
    assert spec.intermediate_size == 7168


CONVERTING = {name: family for name, family in FAMILIES.items() if family.convert_config is not LLAMA.convert_config}


@pytest.mark.parametrize("name", CONVERTING)
def test_a_value_of_another_type_is_no_failure_of_the_family(tmp_path: Path, name: str) -> None:
    for key in CONVERTING[name].defaults:
        for value in ("x", ["x"], {"x": 1}, [[]], -1, 1.5, True, None):
            with suppress(InvalidCheckpoint):
                spec_of(tmp_path, name, **{key: value})


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        (
            LFM2,
            {"num_hidden_layers": "2", "full_attn_idxs": [1]},
            "config.json: num_hidden_layers='2': expected an int",
        ),
        (LFM2, {"block_ff_dim": "9"}, "config.json: block_ff_dim='9': expected an integer"),
        (LFM2, {"block_ffn_dim_multiplier": "1"}, "config.json: block_ffn_dim_multiplier='1': expected a positive"),
        (LFM2, {"full_attn_idxs": 2}, "config.json: full_attn_idxs=2: expected a list"),
        (KIMI_LINEAR, {"linear_attn_config": [1]}, r"linear_attn_config=\[1\]: expected an object"),
        (
            KIMI_LINEAR,
            {"linear_attn_config": {"full_attn_layers": 4}},
            "config.json, linear_attn_config: full_attn_layers=4: expected a list",
        ),
        (HYBRID, {"layers_block_type": "mamba"}, "layers_block_type='mamba': expected a list"),
    ],
)
def test_what_families_convert_is_checked_by_its_name(
    tmp_path: Path, name: str, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidCheckpoint, match=message):
        spec_of(tmp_path, name, **config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"conv_L_cache": 1}, "conv_L_cache=1: expected an integer, at least 2"),
        ({"layer_types": ["conv", "conv"]}, "one of these at least"),
        ({"full_attn_idxs": [2]}, "one of these at least"),
    ],
)
def test_what_convolutions_of_lfm2_need_is_checked(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=message):
        spec_of(tmp_path, LFM2, num_hidden_layers=2, **config)


def test_layers_of_granite_4_are_named_as_by_transformers_4_and_5(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 3, "num_local_experts": 0, "hidden_size": 64, "mamba_n_heads": 16}
    old = spec_of(tmp_path, HYBRID, **sizes, layers_block_type=["mamba", "attention", "mamba"])
    types = ["linear_attention", "full_attention", "linear_attention"]
    limits = [0.0, {"__float__": "Infinity"}]
    assert old == spec_of(tmp_path, HYBRID, **sizes, layer_types=types, time_step_limit=limits)
    assert old.state == Mamba2Spec([True, False, True], 16, 256, v_dim=8, conv_size=4, num_groups=1, has_conv_bias=True)
    assert (old.intermediate_size, old.rotations, old.names.down) == (1024, [None] * 3, "shared_mlp.output_linear")
    rotated = spec_of(tmp_path, HYBRID, **sizes, layer_types=types, position_embedding_type="rope")
    assert rotated.rotations == [Rotation(10000.0)] * 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_local_experts": -1}, "num_local_experts=-1: expected an integer, at least 0"),
        ({"mamba_n_groups": 3}, "mamba_n_groups=3: expected a divisor of mamba_n_heads=16"),
        ({"mamba_d_head": 9}, "mamba_n_heads=16: expected mamba_expand times hidden_size, 128"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias=True: expected false"),
        ({"time_step_limit": [0.0, 1.0]}, r"time_step_limit=\[0.0, 1.0\]: expected 0 and infinity"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type='alibi': expected rope, nope or null"),
    ],
)
def test_what_granite_4_has_beyond_is_refused_by_name(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    sizes = {"num_hidden_layers": 2, "num_local_experts": 0, "hidden_size": 64, "mamba_n_heads": 16}
    with pytest.raises(InvalidCheckpoint, match=message):
        spec_of(tmp_path, HYBRID, **{**sizes, "layer_types": ["mamba", "attention"], **config})


def test_infinity_may_be_written_as_by_python(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"time_step_limit": [0.0, Infinity]}')
    assert JsonFields.read(file).list_("time_step_limit") == [0.0, float("inf")]
    for content in ('{"time_step_limit": [0.0, Infinity}', '{"time_step_limit": [NaN, Infinity]}'):
        file.write_text(content)
        with pytest.raises(InvalidCheckpoint, match="isn't valid JSON"):
            JsonFields.read(file)


@pytest.mark.parametrize("name", ["OlmoForCausalLM", "OlmoeForCausalLM"])
def test_models_with_other_settings_are_left_to_transformers(name: str) -> None:
    own, other = (JsonFields("config.json", {"architectures": [name], "clip_qkv": limit}) for limit in (None, 8.0))
    assert find_own_family(own) == find_family(own) == find_family(other) is not None
    assert find_own_family(other) is None


@pytest.mark.parametrize(("name", "model_type"), [("LlamaForCausalLM", "exaone"), ("Glm4MoeForCausalLM", "sarvam_moe")])
def test_checkpoints_of_another_form_have_no_family(tmp_path: Path, name: str, model_type: str) -> None:
    config = {"architectures": [name], "model_type": model_type}
    assert find_family(JsonFields("config.json", config)) is None
    with pytest.raises(InvalidCheckpoint, match=f"model_type='{model_type}': .*model_impl='transformers'"):
        spec_of(tmp_path, name, model_type=model_type)


def test_the_texts_of_a_checkpoint_are_converted_as_their_family_says(tmp_path: Path) -> None:
    text = {"model_type": "kimi_k2", "num_attention_heads": 8, "n_group": 1, "topk_group": 1, "qk_rope_head_dim": 32}
    spec = spec_of(tmp_path, "KimiK25ForConditionalGeneration", text_config=text)
    assert (spec.num_kv_heads, spec.head_dim, spec.latent is None) == (1, 32, False)
