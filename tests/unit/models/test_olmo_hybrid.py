"""What config.json of OLMo Hybrid means, and its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from families import make_checkpoint
from model_specs import spec_of
from safetensors.torch import load_file, save_file

from raycore.checkpoint.model_spec import load_model_spec
from raycore.checkpoint.stored_model import fit_model
from raycore.errors import InvalidCheckpoint
from raycore.models.mixers.delta import DeltaSpec

OLMO_HYBRID = "OlmoHybridForCausalLM"


def test_sizes_of_olmo_hybrid_follow_from_others(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, OLMO_HYBRID, num_hidden_layers=5)
    assert isinstance(spec.state, DeltaSpec)
    assert spec.state.layers == [True, True, True, False, True]
    state = spec.state
    assert (state.num_k_heads, state.num_v_heads, state.k_dim, state.v_dim) == (30, 30, 96, 192)
    assert (state.largest_share, state.norm_eps, state.is_split) == (2.0, 1e-5, True)
    small = spec_of(tmp_path, OLMO_HYBRID, num_hidden_layers=2, linear_allow_neg_eigval=False).state
    assert isinstance(small, DeltaSpec)
    assert (small.layers, small.largest_share) == ([True, False], 1.0)


def test_a_base_of_null_rotates_nothing(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": None}
    assert spec_of(tmp_path, OLMO_HYBRID, rope_parameters=rope).rotations == [None] * 32
    assert spec_of(tmp_path, OLMO_HYBRID, rope_theta=None).rotations == [None] * 32
    rotated = spec_of(tmp_path, OLMO_HYBRID, rope_parameters=rope | {"rope_theta": 5e5}).rotations[0]
    assert rotated is not None
    assert rotated.theta == 5e5


def test_norms_are_before_the_blocks_of_layers_that_keep_states_alone(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, OLMO_HYBRID, num_hidden_layers=4)
    assert spec.norms(0) == ("attention_layer_norm", None, "feedforward_layer_norm", None)
    assert spec.norms(3) == (None, "post_attention_layernorm", None, "post_feedforward_layernorm")


@pytest.mark.parametrize("name", ["post_attention_layernorm", "feedforward_layer_norm"])
def test_norms_after_attention_have_one_of_two_names(tmp_path: Path, name: str) -> None:
    path = make_checkpoint("olmo_hybrid", tmp_path)
    saved = "layers.1.feedforward_layer_norm"
    for file in path.glob("*.safetensors"):
        tensors = {key.replace(saved, f"layers.1.{name}"): each for key, each in load_file(file).items()}
        save_file(tensors, file, {"format": "pt"})
    index = path / "model.safetensors.index.json"
    assert saved in index.read_text()
    index.write_text(index.read_text().replace(saved, f"layers.1.{name}"))
    spec = fit_model(load_model_spec(path), path)
    assert spec.norms(1).after_attention == name
    assert fit_model(spec, path) == spec


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"linear_num_key_heads": 4, "linear_num_value_heads": 6}, "expected a multiple of linear_num_key_heads=4"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu': expected silu"),
    ],
)
def test_what_olmo_hybrid_needs_is_checked(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=message):
        spec_of(tmp_path, OLMO_HYBRID, **config)
