"""Gemma 4: layers that read the keys and values of others, and inputs of layers, as config.json describes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gemma4_config import CONFIG, GEMMA4
from model_specs import spec_of

from raycore.errors import InvalidCheckpoint
from raycore.models.mixers.attention import AttentionHeads
from raycore.models.spec import ModelSpec


def heads_of(spec: ModelSpec) -> list[tuple[int, int]]:
    made = [each for each in spec.mixers if isinstance(each, AttentionHeads)]
    return [(each.num_kv_heads, each.head_dim) for each in made]


def test_heads_are_read_in_both_forms(tmp_path: Path) -> None:
    old = CONFIG | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "layer_types": None}
    own = {str(layer): {"head_dim": 16, "num_key_value_heads": 1} for layer in (5, 8)}
    new = {key: value for key, value in old.items() if "global" not in key} | {"per_layer_config": own}
    found = spec_of(tmp_path, GEMMA4, **old)
    assert heads_of(found) == [(2, 8)] * 5 + [(1, 16)] + [(2, 8)] * 2 + [(1, 16)]
    assert heads_of(spec_of(tmp_path, GEMMA4, **new)) == heads_of(found)
    # there is no projection of values
    assert "self_attn.v_proj.weight" not in found.mixers[5].tensors(found)
    assert "self_attn.v_proj.weight" in found.mixers[4].tensors(found)


def test_only_proportional_rotations_turn_some_pairs(tmp_path: Path) -> None:
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
    }
    spec = spec_of(tmp_path, GEMMA4, **CONFIG | {"rope_parameters": rope})
    found = [(each.theta, each.fraction, each.is_proportional) for each in spec.rotations[1:3] if each is not None]
    assert found == [(100.0, 1.0, False), (1000.0, 0.5, True)]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all': expected null or vision"),
        ({"num_kv_shared_layers": 9}, "num_kv_shared_layers=9: expected so few"),
        ({"num_kv_shared_layers": 7}, "num_kv_shared_layers=7: expected so few"),
        ({"vocab_size_per_layer_input": 99}, "vocab_size_per_layer_input=99: expected at least vocab_size=100"),
        ({"per_layer_config": {"8": {"head_dim": 16}}}, "the same heads in layer 8 as in 5"),
        ({"per_layer_config": {"9": {"head_dim": 16}}}, "numbers of layers below num_hidden_layers=9"),
        ({"per_layer_config": {"2": {"intermediate_size": 16}}}, "intermediate_size=16: expected only head_dim"),
        ({"per_layer_config": {"2": {"num_key_value_heads": 3}}}, "num_key_value_heads=3: expected a divisor"),
        ({"per_layer_config": {"2": {"head_dim": 7}}}, "head_dim=7: expected an even number"),
        ({"enable_moe_block": True}, "use_double_wide_mlp=True: expected false"),
        (
            {"enable_moe_block": True, "use_double_wide_mlp": False, "num_experts": 2, "top_k_experts": 3},
            "top_k_experts=3: expected at most num_experts=2",
        ),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path: Path, other: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=message):
        spec_of(tmp_path, GEMMA4, **CONFIG | other)
