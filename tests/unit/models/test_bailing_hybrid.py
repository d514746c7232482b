"""What config.json of Ling 3 means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from model_specs import spec_of

from raycore.errors import InvalidCheckpoint
from raycore.models.mixers.kda import KdaSpec
from raycore.models.mixers.latent import LatentHeads
from raycore.models.rotation import Rotation

LING = "BailingHybridForCausalLM"


@pytest.mark.parametrize("name", [LING, "BailingMoeV3ForCausalLM"])
def test_every_sixth_layer_of_ling_has_latent_attention(tmp_path: Path, name: str) -> None:
    spec = spec_of(tmp_path, name, num_hidden_layers=12, model_max_length=4096, num_experts_per_token=4)
    full = ([False] * 5 + [True]) * 2
    expected = KdaSpec(
        [not each for each in full],
        num_v_heads=32,
        k_dim=128,
        v_dim=128,
        conv_size=4,
        is_direct=True,
        least_decay=-5.0,
        block="attention",
    )
    assert spec.state == expected
    assert spec.latent == LatentHeads(512, 128, 64, 128, block="attention", has_gate=True)
    assert (spec.rotations[0], spec.head_dim) == (Rotation(6e6, is_adjacent=True), 64)
    assert (spec.max_position_embeddings, spec.num_predictors) == (4096, 1)
    assert spec.moe is not None
    assert (spec.moe.sparse_layers, spec.moe.num_experts_per_tok) == ([False] * 2 + [True] * 10, 4)
    types = ["full_attention" if each else "linear_attention" for each in full]
    # as transformers saves it
    saved = {"layer_types": types, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 10, "head_dim": 64}
    same = spec_of(
        tmp_path,
        name,
        num_hidden_layers=12,
        model_max_length=4096,
        num_experts_per_token=4,
        linear_head_dim=128,
        **saved,
    )
    assert same == spec
    unlimited = spec_of(tmp_path, name, num_hidden_layers=12, kda_safe_gate=False)
    assert isinstance(unlimited.state, KdaSpec)
    assert unlimited.state.least_decay is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kda_lower_bound": 1.0}, "kda_lower_bound=1.0: expected a negative number"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu': expected silu"),
        ({"layer_types": ["linear_attention"] * 2}, "one of these at least"),
        ({"layer_types": None}, "num_hidden_layers=2: expected a multiple of layer_group_size=6, or layer_types"),
        ({"no_kda_lora": False}, "no_kda_lora=False: expected true"),
        ({"gated_attention_proj_granularity_type": "element_wise"}, "'element_wise': expected head_wise"),
        ({"rope_interleave": False}, "rope_interleave=False: expected true"),
        ({"moe_router_enable_expert_bias": False}, "moe_router_enable_expert_bias=False: expected true"),
        ({"score_function": "softmax"}, "score_function='softmax': expected sigmoid"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax': expected sigmoid"),
        ({"topk_method": "greedy"}, "topk_method='greedy': expected noaux_tc"),
        ({"expert_swiglu_limit_list": [0, 7.0]}, r"expert_swiglu_limit_list=\[0, 7.0\]: expected none, or 0"),
        ({"share_expert_swiglu_limit_list": 7.0}, "share_expert_swiglu_limit_list=7.0: expected a list"),
        (
            {"moe_shared_expert_intermediate_size": 100},
            "moe_shared_expert_intermediate_size=100: expected moe_intermediate_size=768",
        ),
    ],
)
def test_what_ling_needs_is_checked(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    types = ["linear_attention", "full_attention"]
    with pytest.raises(InvalidCheckpoint, match=message):
        spec_of(tmp_path, LING, num_hidden_layers=2, **{"layer_types": types, **config})


def test_settings_of_ling_that_are_as_they_are_computed_change_nothing(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, LING, num_hidden_layers=6, num_shared_experts=2)
    settings = {
        "no_kda_lora": True,
        "gated_attention_proj_granularity_type": "head_wise",
        "rope_interleave": True,
        "moe_router_enable_expert_bias": True,
        "score_function": "sigmoid",
        "scoring_func": None,
        "topk_method": "noaux_tc",
        "expert_swiglu_limit_list": [0, None, 0.0, 0, 0, 0],
        "share_expert_swiglu_limit_list": None,
        "moe_shared_expert_intermediate_size": 1536,
        "partial_rotary_factor": 0.5,
    }
    assert spec_of(tmp_path, LING, num_hidden_layers=6, num_shared_experts=2, **settings) == spec
