"""What config.json of Falcon, GPT-J, GPT-NeoX and Phi means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from model_specs import spec_of

from raycore.errors import InvalidCheckpoint, InvalidConfig

FALCON, GPTJ, GPT_NEOX, PHI = "FalconForCausalLM", "GPTJForCausalLM", "GPTNeoXForCausalLM", "PhiForCausalLM"
NEW = {"new_decoder_architecture": True, "hidden_size": 8192, "num_attention_heads": 128, "num_kv_heads": 8}


def test_falcon_7b_has_one_key_value_head_and_one_norm(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, FALCON, num_hidden_layers=2)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.intermediate_size) == (71, 1, 64, 18176)
    assert (spec.qkv_by_group, spec.is_parallel, spec.is_gated, spec.qkv_bias) == (False, True, False, False)
    assert spec.norms(0).given == ["input_layernorm"]
    # as in early files
    early = spec_of(tmp_path, FALCON, n_layer=2, n_head=8, n_embed=512, n_head_kv=2, multi_query=False, bias=True)
    assert (early.num_layers, early.num_heads, early.num_kv_heads, early.mlp_bias) == (2, 8, 8, True)
    assert early.hidden_size == 512
    # present keys count
    assert spec_of(tmp_path, FALCON, n_head=4, num_attention_heads=8, hidden_size=512).num_heads == 8


def test_falcon_40b_has_several_key_value_heads_and_a_norm_of_each_block(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, FALCON, **NEW)
    assert (spec.num_kv_heads, spec.qkv_by_group) == (8, True)
    assert spec.norms(0).given == ["ln_attn", "ln_mlp"]
    # that of 11 billion has one of both
    assert spec_of(tmp_path, FALCON, **NEW, num_ln_in_parallel_attn=1).norms(0).given == ["input_layernorm"]
    spec.check_tensor_parallel(8)
    with pytest.raises(InvalidConfig, match="doesn't divide the model's num_key_value_heads=8"):
        spec.check_tensor_parallel(16)


def test_blocks_of_falcon_may_follow_each_other(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, FALCON, parallel_attn=False)
    assert (spec.is_parallel, spec.norms(0).given) == (False, ["input_layernorm", "post_attention_layernorm"])


def test_keys_of_gpt_neox_are_read(tmp_path: Path) -> None:
    spec = spec_of(
        tmp_path,
        GPT_NEOX,
        rotary_pct=0.5,
        rotary_emb_base=500,
        layer_norm_eps=0.1,
        num_hidden_layers=1,
        hidden_act="gelu_fast",
    )
    (rotation,) = spec.rotations
    assert rotation is not None
    assert (rotation.fraction, rotation.theta, spec.rms_norm_eps) == (0.5, 500.0, 0.1)
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.is_parallel) == (True, True, True, True)
    assert (spec.names.head, spec.names.embedding) == ("embed_out.weight", "gpt_neox.embed_in.weight")


def test_keys_of_gptj_are_read(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, GPTJ, n_embd=512, n_head=8, n_layer=2, n_positions=99, rotary_dim=32)
    sizes = spec.hidden_size, spec.intermediate_size, spec.num_heads, spec.num_kv_heads, spec.head_dim
    assert sizes == (512, 2048, 8, 8, 64)
    assert (spec.num_layers, spec.max_position_embeddings) == (2, 99)
    assert spec.rotations[0] is not None
    assert (spec.rotations[0].fraction, spec.rotations[0].is_adjacent) == (0.5, True)
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.has_head_bias) == (False, False, True, True)
    assert spec.norms(0).given == ["ln_1"]
    (rotation,) = spec_of(tmp_path, GPTJ, n_embd=100, n_head=1, n_layer=1, rotary_dim=58).rotations
    assert rotation is not None
    assert rotation.num_components(100) == 58  # and 100 · (58 / 100) is less


def test_everything_of_phi_has_a_bias(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, PHI, partial_rotary_factor=0.4, hidden_size=2560)
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.has_head_bias) == (True,) * 4
    assert spec.rotations[0] is not None
    assert spec.rotations[0].num_components(spec.head_dim) == 32
    assert spec.names.head_bias == "lm_head.bias"


@pytest.mark.parametrize(
    ("architecture", "config", "message"),
    [
        (FALCON, {"alibi": True}, "alibi=True: expected false"),
        (FALCON, {**NEW, "parallel_attn": False}, "parallel_attn=False: expected true with new_decoder_architecture"),
        (FALCON, {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn=2: expected 1, or 2 with"),
        (FALCON, {"activation": "selu"}, "hidden_act='selu': expected one of"),
        (GPTJ, {"rotary_dim": 512}, "rotary_dim=512: expected an even number, at most 256"),
        (GPTJ, {"rotary_dim": 33}, "rotary_dim=33: expected an even number, at most 256"),
        (GPTJ, {"rotary_dim": None}, "rotary_dim is missing: expected an integer"),
        (GPT_NEOX, {"rotary_pct": 2}, "partial_rotary_factor=2: expected a number up to 1"),
        (GPT_NEOX, {"rotary_pct": 0.35}, "partial_rotary_factor=0.35: expected one that gives an even number of .*96"),
        (PHI, {"rope_parameters": {"partial_rotary_factor": 0.25}, "hidden_size": 640}, "rope_parameters.*even number"),
    ],
)
def test_what_is_not_computed_is_refused(
    tmp_path: Path, architecture: str, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidCheckpoint, match=message):
        spec_of(tmp_path, architecture, **config)
