"""Layers whose attention has other heads than that of others, as config.json describes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from model_specs import spec_of

from raycore.config.checks import check_chunks
from raycore.errors import InvalidCheckpoint, InvalidConfig
from raycore.models.mixers.attention import AttentionHeads, DifferingHeads
from raycore.models.rotation import Rotation
from raycore.models.spec import LayerGates, LimitedSilu, ModelSpec, QueryScale

MIMO, LAGUNA, STEP = "MiMoV2FlashForCausalLM", "LagunaForCausalLM", "Step3p7ForConditionalGeneration"
LLAMA4 = "Llama4ForCausalLM"
FEW_LAYERS = {
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
}


def heads_of(spec: ModelSpec) -> list[tuple[int, int, int, int, bool]]:
    """By layer."""
    made = [each for each in spec.mixers if isinstance(each, AttentionHeads)]
    return [(each.num_heads, each.num_kv_heads, each.head_dim, each.value_dim, each.sinks) for each in made]


def test_layers_with_the_same_heads_have_one_kind_of_attention(tmp_path: Path) -> None:
    plain = spec_of(tmp_path)
    assert len(plain.attentions) == 1
    assert not isinstance(plain.attentions[0], DifferingHeads)
    assert plain.why_not("draft_model") is None
    spec = spec_of(tmp_path, LAGUNA, **FEW_LAYERS, num_attention_heads_per_layer=[4, 8, 4])
    first, second = spec.attentions
    assert [each is first for each in spec.mixers] == [True, False, True]
    assert spec.mixers[1] is second
    assert spec.why_not("graphs") is None
    assert spec.why_not("draft_model") == spec.why_not("roofline") == "has layers whose heads differ"


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        (LAGUNA, FEW_LAYERS),
        (STEP, {"text_config": FEW_LAYERS}),
        (MIMO, FEW_LAYERS | {"layer_types": ["full_attention"] * 3}),
    ],
)
def test_heads_that_are_alike_do_not_differ(tmp_path: Path, architecture: str, config: dict[str, Any]) -> None:
    spec = spec_of(tmp_path, architecture, **config)
    assert len(spec.attentions) == 1
    assert spec.why_not("draft_model") is spec.why_not("roofline") is None


def test_mimos_norms_and_rotations_have_one_default(tmp_path: Path) -> None:
    rope = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")}
    spec = spec_of(tmp_path, MIMO, rope_parameters=rope, layernorm_epsilon=1e-3, rms_norm_eps=1e-5)
    assert spec.rotations[0] == Rotation(1e4, fraction=0.334)
    assert spec.rms_norm_eps == 1e-5
    assert spec_of(tmp_path, MIMO, layernorm_epsilon=1e-3).rms_norm_eps == 1e-3


def test_mimo_has_other_heads_in_layers_with_windows(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, MIMO)
    assert spec.why_not("graphs") is not None
    full, local = (64, 4, 192, 128, False), (64, 8, 192, 128, True)
    assert heads_of(spec)[:7] == [full, local, local, local, local, full, local]
    assert (spec.layer_windows[:2], spec.value_scale, spec.qkv_bias) == ([None, 129], 0.707, False)
    assert spec.rotations[:2] == [Rotation(5e6, fraction=0.334), Rotation(1e4, fraction=0.334)]
    assert spec.moe is not None
    assert spec.moe.sparse_layers == [False] + [True] * 47


def test_mimos_own_files_are_read_as_those_of_transformers(tmp_path: Path) -> None:
    expected = spec_of(tmp_path, MIMO, num_hidden_layers=7)
    pattern = [0, 1, 1, 1, 1, 0, 1]
    own = {
        "hybrid_layer_pattern": pattern,
        "moe_layer_freq": [0, 1, 1, 1, 1, 1, 1],
        "layernorm_epsilon": 1e-5,
        "sliding_window": 128,
        "sliding_window_size": 128,
        "rope_theta": 5000000,
        "swa_rope_theta": 10000,
        "partial_rotary_factor": 0.334,
        "swa_num_attention_heads": 64,
        "swa_num_key_value_heads": 8,
        "swa_head_dim": 192,
        "swa_v_head_dim": 128,
        "add_full_attention_sink_bias": False,
        "routed_scaling_factor": None,
        "n_shared_experts": None,
    }
    found = spec_of(tmp_path, MIMO, num_hidden_layers=7, **own)
    assert heads_of(found) == heads_of(expected)
    assert (found.layer_windows, found.rotations) == (expected.layer_windows, expected.rotations)
    assert (found.moe, found.rms_norm_eps) == (expected.moe, expected.rms_norm_eps)
    others = spec_of(
        tmp_path, MIMO, **FEW_LAYERS, swa_num_attention_heads=6, swa_num_key_value_heads=3, swa_head_dim=96
    )
    assert heads_of(others)[:2] == [(8, 2, 192, 128, False), (6, 3, 96, 128, True)]


def test_steps_own_files_are_read_as_those_of_transformers(tmp_path: Path) -> None:
    types = FEW_LAYERS["layer_types"]
    expected = spec_of(
        tmp_path,
        STEP,
        text_config=FEW_LAYERS
        | {
            "num_sliding_attention_heads": 12,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "linear",
                    "rope_theta": 5e6,
                    "partial_rotary_factor": 0.5,
                    "factor": 2.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
            },
            "swiglu_limits": [None, None, 7.0],
            "swiglu_limits_shared": [None, 16.0, None],
            "num_nextn_predict_layers": 1,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
        },
    )
    own = {key: value for key, value in FEW_LAYERS.items() if key != "num_key_value_heads"} | {
        "num_attention_groups": 2,
        "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 12},
        "layer_types": [*types, "full_attention"],
        "moe_layers_enum": "1,2",
        "rope_theta": [5e6, 1e4, 1e4, 1e4],
        "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0],
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "swiglu_limits": [0.0, 0.0, 7, 0.0],
        "swiglu_limits_shared": [0.0, 16, 0.0, 0.0],
        "num_nextn_predict_layers": 1,
        "moe_num_experts": 16,
        "moe_top_k": 4,
    }
    found = spec_of(tmp_path, STEP, text_config=own)
    assert found == expected
    assert [each[0] for each in heads_of(found)] == [8, 12, 12]
    assert found.layer_gates == [
        LayerGates("silu", "silu"),
        LayerGates("silu", LimitedSilu(16.0)),
        LayerGates(LimitedSilu(7.0), "silu"),
    ]


def test_only_full_attention_of_step_is_scaled(tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    config = FEW_LAYERS | {"rope_theta": 1e4, "rope_scaling": scaling}
    rotations = spec_of(tmp_path, STEP, text_config=config).rotations
    assert [each and each.scaling is not None for each in rotations] == [True, False, False]
    assert spec_of(tmp_path, "Step3p5ForCausalLM", **config).rotations == rotations


def test_llama_4_as_transformers_4_wrote_it(tmp_path: Path) -> None:
    expected = spec_of(tmp_path, LLAMA4, num_hidden_layers=4)
    found = spec_of(tmp_path, LLAMA4, num_hidden_layers=4, attn_temperature_tuning=4, floor_scale=8192.0)
    assert found == expected
    off = spec_of(tmp_path, LLAMA4, num_hidden_layers=4, attn_temperature_tuning=0, attn_scale=0)
    assert off.query_scale is None
    with pytest.raises(InvalidCheckpoint, match=r"floor_scale=0\.5: expected a whole number of tokens"):
        spec_of(tmp_path, LLAMA4, num_hidden_layers=4, floor_scale=0.5)


@pytest.mark.parametrize(
    ("architecture", "config", "message"),
    [
        (
            MIMO,
            {"num_attention_heads": 12, "num_key_value_heads": 4},
            r"num_key_value_heads=4: .* which have 8, divide 12",
        ),
        (MIMO, {"swa_num_key_value_heads": 3}, r"swa_num_key_value_heads=3: .* which have 3, divide 8 heads"),
        (MIMO, {"scoring_func": "softmax"}, "scoring_func='softmax': expected sigmoid"),
        (MIMO, {"n_shared_experts": 1}, "n_shared_experts=1: expected null"),
        (MIMO, {"mlp_layer_types": ["dense"]}, "mlp_layer_types=.*: expected a list of 3 entries"),
        (MIMO, {"head_dim": 16, "v_head_dim": 32}, "v_head_dim=32: expected at most 16"),
        (MIMO, {"swa_head_dim": 96, "swa_v_head_dim": 97}, "swa_v_head_dim=97: expected at most 96"),
        (LAGUNA, {"num_attention_heads_per_layer": [8, 8]}, "num_attention_heads_per_layer=.*: expected 3 multiples"),
        (LAGUNA, {"num_attention_heads_per_layer": [8, 7, 8]}, "of num_key_value_heads=2"),
        (LAGUNA, {"gating": False}, "gating=False: expected true, per-head or per-element"),
        (LAGUNA, {"moe_router_logit_softcapping": 5.0}, "moe_router_logit_softcapping=5.0: expected 0.0"),
        (LLAMA4, {"no_rope_layers": [1]}, "no_rope_layers=.*: expected 3 entries"),
        (LLAMA4, {}, "layer_types=.*: expected a list of 3 entries .*, each chunked_attention or full_attention"),
        (LLAMA4, {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1: expected 0.0"),
        ("Lfm3ForCausalLM", {"layer_types": ["conv"] * 3}, "layer_types=.*: expected .* not all of them conv"),
    ],
)
def test_what_is_not_computed_is_refused(
    tmp_path: Path, architecture: str, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidCheckpoint, match=message):
        spec_of(tmp_path, architecture, **FEW_LAYERS | config)


def test_ranks_divide_the_heads_of_all_layers(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, LAGUNA, **FEW_LAYERS, num_attention_heads_per_layer=[8, 6, 8])
    spec.check_tensor_parallel(2)
    with pytest.raises(
        InvalidConfig, match=r"=4 doesn't divide .* num_attention_heads_per_layer=6: choose one of \[1, 2\]"
    ):
        spec.check_tensor_parallel(4)
    mimo = {"num_attention_heads": 24, "swa_num_attention_heads": 24, "swa_num_key_value_heads": 6}
    spec = spec_of(tmp_path, MIMO, **FEW_LAYERS | mimo)
    spec.check_tensor_parallel(2)
    with pytest.raises(InvalidConfig, match=r"=4 neither divides .* swa_num_key_value_heads=6 .* \[1, 2\]"):
        spec.check_tensor_parallel(4)


def test_layers_of_llama_4_have_chunks_where_they_rotate(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, LLAMA4, num_hidden_layers=5, interleave_moe_layer_step=2)
    assert spec.layer_windows == [8192, 8192, 8192, None, 8192]
    assert spec.windows_are_chunks
    assert [each is None for each in spec.rotations] == [False, False, False, True, False]
    assert spec.rotations[0] == Rotation(500000.0, is_adjacent=True)
    assert spec.query_scale == QueryScale(0.1, 8192, shift=1, with_rotation=False)
    assert (spec.qk_norm, spec.is_rotated_first, spec.intermediate_size) == ("unit", True, 16384)
    assert spec.moe is not None
    assert (spec.moe.sparse_layers, spec.moe.intermediate_size) == ([False, True, False, True, False], 8192)
    assert {spec.why_not(asked) for asked in ("draft_model", "graphs", "roofline")} == {
        "has layers whose attention is within chunks"
    }
    others = {"use_qk_norm": False, "attn_temperature_tuning": False, "attention_chunk_size": None, "moe_layers": [0]}
    spec = spec_of(tmp_path, LLAMA4, num_hidden_layers=2, no_rope_layers=[0, 1], **others)
    assert (spec.qk_norm, spec.is_rotated_first, spec.query_scale) == (None, False, None)
    assert (spec.layer_windows, spec.rotations[0]) == ([None, None], None)


def test_blocks_divide_chunks(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, LLAMA4, num_hidden_layers=4, attention_chunk_size=48)
    check_chunks(spec, 16, 1)
    check_chunks(spec, 8, 2)
    with pytest.raises(InvalidConfig, match="block_size=32 doesn't divide the 48 tokens of a chunk"):
        check_chunks(spec, 32, 1)
    with pytest.raises(InvalidConfig, match=r"block_size=16 times the 2 workers .* doesn't divide the 48 tokens"):
        check_chunks(spec, 16, 2)
    check_chunks(spec_of(tmp_path, "MistralForCausalLM", sliding_window=50), 16, 1)
