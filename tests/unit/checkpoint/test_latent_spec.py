"""What raycore takes config.json to mean where attention is latent attention: DeepSeek, Kimi K2, GLM-4.7-Flash."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from raycore.checkpoint.model_spec import load_model_spec
from raycore.checkpoint.stages import layer_costs
from raycore.errors import InvalidCheckpoint, InvalidConfig
from raycore.models.mixers.latent import LatentHeads
from raycore.models.spec import ModelSpec
from raycore.parts.experts.models import ExpertChoice, SharedExperts

YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "max_position_embeddings": 163840,
}
V3 = SIZES | {"n_group": 4, "topk_group": 2, "rope_scaling": YARN, "rope_theta": 10000}


def spec_of(path: Path, architecture: str, **config: Any) -> ModelSpec:
    (path / "config.json").write_text(json.dumps({"architectures": [architecture], **config}))
    return load_model_spec(path)


def test_deepseek_v3_has_latent_heads_whose_scores_grow_with_the_stretched_positions(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "DeepseekV3ForCausalLM", **V3, topk_method="noaux_tc", scoring_func="sigmoid")
    assert spec.latent == LatentHeads(rank=512, plain_dim=128, rotated_dim=64, value_dim=128, query_rank=1536)
    assert (spec.head_dim, spec.num_kv_heads) == (64, 1), "one rotated key for all query heads"
    assert spec.attention_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    rotation = spec.rotations[0]
    assert rotation is not None
    assert rotation.is_adjacent
    assert rotation.scaling is not None
    assert rotation.scaling.attention_factor == 1.0, "mscale and mscale_all_dim are equal"
    assert (spec.moe.sparse_layers, spec.num_predictors) == ([False, False, False, True], 1)
    router = ExpertChoice("sigmoid", True, True, num_groups=4, num_chosen_groups=2, scaling=2.5, in_float32=True)
    assert spec.moe.router == router
    spec.check_tensor_parallel(2)
    with pytest.raises(InvalidConfig, match="num_attention_heads=4"):
        spec.check_tensor_parallel(8)


@pytest.mark.parametrize("off", [0.0, 0, None])
def test_scores_do_not_grow_where_mscale_all_dim_is_off(tmp_path: Path, off: float | None) -> None:
    config = V3 | {"rope_scaling": YARN | {"mscale_all_dim": off}}
    spec = spec_of(tmp_path, "DeepseekV3ForCausalLM", **config)
    assert spec.attention_scale == pytest.approx(192**-0.5)
    rotation = spec.rotations[0]
    assert rotation is not None
    assert rotation.scaling is not None
    assert rotation.scaling.attention_factor == pytest.approx(0.1 * math.log(40) + 1)


@pytest.mark.parametrize("wrong", [-1.0, True, "1", float("nan")])
def test_an_mscale_all_dim_below_0_is_refused(tmp_path: Path, wrong: object) -> None:
    with pytest.raises(InvalidCheckpoint):
        spec_of(tmp_path, "DeepseekV3ForCausalLM", **V3 | {"rope_scaling": YARN | {"mscale_all_dim": wrong}})


@pytest.mark.parametrize(
    "architecture",
    [
        *("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM", "Mistral4ForCausalLM"),
        "BailingHybridForCausalLM",
    ],
)
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling", None])
def test_the_rotated_part_of_latent_heads_is_rotated_whole(tmp_path: Path, architecture: str, key: str | None) -> None:
    rope = YARN | {"rope_theta": 10000.0}
    half = {"partial_rotary_factor": 0.5}
    config = SIZES | {"num_hidden_layers": 6, "n_group": 4, "topk_group": 2}
    plain = spec_of(tmp_path, architecture, **config, **({} if key is None else {key: rope}))
    changed = half if key is None else {key: rope | half}
    assert spec_of(tmp_path, architecture, **config, **changed) == plain
    assert plain.rotations[0].num_components(plain.head_dim) == 64


def test_kimi_k2_is_a_deepseek_v3(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "DeepseekV3ForCausalLM", **SIZES, model_type="kimi_k2", n_group=1, topk_group=1)
    assert spec.model_type == "kimi_k2"
    assert spec.moe.router.num_groups == 1
    assert spec.attention_scale == 192**-0.5


def test_deepseek_v2_compares_groups_by_their_best_expert(tmp_path: Path) -> None:
    groups = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 16.0}
    spec = spec_of(tmp_path, "DeepseekV2ForCausalLM", **SIZES, **groups, first_k_dense_replace=1)
    router = ExpertChoice(num_groups=4, num_chosen_groups=2, num_compared=1, scaling=16.0, in_float32=True)
    assert spec.moe.router == router
    assert spec.moe.shared == SharedExperts(12, size_key="moe_intermediate_size times n_shared_experts")
    lite = spec_of(tmp_path, "DeepseekV2ForCausalLM", **SIZES, q_lora_rank=None, n_group=1, topk_group=1)
    assert lite.latent.query_rank is None
    assert lite.moe.router == ExpertChoice(num_compared=1, in_float32=True)


def test_glm_47_flash_lists_its_layers_with_experts(tmp_path: Path) -> None:
    types = ["dense", "sparse", "dense", "sparse"]
    spec = spec_of(tmp_path, "Glm4MoeLiteForCausalLM", **SIZES, mlp_layer_types=types)
    assert spec.latent == LatentHeads(rank=512, plain_dim=192, rotated_dim=64, value_dim=256, query_rank=768)
    assert spec.moe.sparse_layers == [False, True, False, True]
    assert spec_of(tmp_path, "Glm4MoeLiteForCausalLM", **SIZES).moe.sparse_layers == [False, True, True, True]


@pytest.mark.parametrize(
    ("architecture", "config", "expected"),
    [
        ("DeepseekV3ForCausalLM", {"topk_method": "greedy"}, "topk_method='greedy': expected noaux_tc"),
        ("DeepseekV3ForCausalLM", {"scoring_func": "softmax"}, "scoring_func='softmax': expected sigmoid"),
        ("DeepseekV3ForCausalLM", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("DeepseekV3ForCausalLM", {"kv_lora_rank": 33}, "kv_lora_rank=33: expected an even number"),
        (
            "DeepseekV3ForCausalLM",
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
            r"weight_block_size=\[128\]",
        ),
        ("DeepseekV2ForCausalLM", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'.*group_limited_greedy"),
        ("DeepseekV2ForCausalLM", {"norm_topk_prob": True}, "norm_topk_prob=True: expected false"),
        ("Glm4MoeLiteForCausalLM", {"mlp_layer_types": ["dense"]}, r"mlp_layer_types=.*a list of 4 entries"),
    ],
)
def test_settings_that_would_be_computed_wrongly_are_refused_by_name(
    tmp_path: Path, architecture: str, config: dict[str, Any], expected: str
) -> None:
    with pytest.raises(InvalidCheckpoint, match=expected):
        spec_of(tmp_path, architecture, **(V3 | config))


@pytest.mark.parametrize("query_rank", [None, 16])
def test_the_cost_of_a_layer_has_its_projections(tmp_path: Path, query_rank: int | None) -> None:
    sizes = {"kv_lora_rank": 32, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
    dense = SIZES | sizes | {"intermediate_size": 10, "first_k_dense_replace": 4, "vocab_size": 1, "n_group": 1}
    spec = spec_of(tmp_path, "DeepseekV3ForCausalLM", **dense, q_lora_rank=query_rank, topk_group=1)
    queries = 64 * 4 * 12 if query_rank is None else 64 * 16 + 16 * 4 * 12
    weights = queries + 64 * 36 + 32 * 4 * 14 + 4 * 6 * 64 + 3 * 64 * 10
    assert layer_costs(spec)[0] == pytest.approx(weights, rel=0.02)
