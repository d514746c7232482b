"""What config.json of Falcon-H1 means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from model_specs import spec_of

from raycore.errors import InvalidCheckpoint
from raycore.models.mixers.beside import BesideSpec

FALCON_H1 = "FalconH1ForCausalLM"


def test_every_layer_of_falcon_h1_has_both_mixers(tmp_path: Path) -> None:
    # types of layers are those of other versions, and say nothing
    spec = spec_of(tmp_path, FALCON_H1, num_hidden_layers=3, layers_block_type=["hybrid"] * 3)
    assert isinstance(spec.state, BesideSpec)
    assert spec.mixers == [spec.state] * 3
    mamba = spec.state.mamba
    assert (mamba.num_v_heads, mamba.v_dim, mamba.k_dim, mamba.num_groups, mamba.norm) == (128, 8, 256, 1, None)
    assert (spec.dense, spec.mlp_multipliers) == ("plain", (1.0, 1.0))
    wide = spec_of(tmp_path, FALCON_H1, mamba_d_ssm=None, mamba_rms_norm=True).state
    assert isinstance(wide, BesideSpec)
    assert (wide.mamba.v_dim, wide.mamba.norm) == (64, "before_gate")
    after = spec_of(tmp_path, FALCON_H1, mamba_rms_norm=True, mamba_norm_before_gate=False).state
    assert isinstance(after, BesideSpec)
    assert after.mamba.norm == "after_gate"


def test_multipliers_of_falcon_h1_are_read(tmp_path: Path) -> None:
    given = {
        "lm_head_multiplier": 0.5,
        "embedding_multiplier": 3.0,
        "key_multiplier": 0.25,
        "attention_in_multiplier": 1.5,
        "attention_out_multiplier": 0.75,
        "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.625,
        "ssm_multipliers": [0.5, 1, 2, 3, 4],
        "mlp_multipliers": [2, 0.125],
    }
    spec = spec_of(tmp_path, FALCON_H1, head_dim=64, **given)
    assert isinstance(spec.state, BesideSpec)
    assert (spec.logits_multiplier, spec.embedding_multiplier, spec.attention_scale) == (0.5, 3.0, 0.25 / 8)
    assert (spec.state.attention_multipliers, spec.state.mamba_multipliers) == ((1.5, 0.75), (1.25, 0.625))
    assert (spec.state.mamba.multipliers, spec.mlp_multipliers) == ((0.5, 1.0, 2.0, 3.0, 4.0), (2.0, 0.125))
    assert spec.dense == "scaled"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"projectors_bias": True}, "projectors_bias=True: expected false"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias=True: expected false"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu': expected silu"),
        ({"mamba_d_head": 7}, "mamba_d_ssm, 1024, divided by mamba_d_head"),
        ({"mlp_multipliers": [1.0]}, "mlp_multipliers=.*: expected a list of 2 numbers"),
        ({"ssm_multipliers": [1, 1, 1, 1, True]}, "ssm_multipliers=.*: expected a list of 5 numbers"),
        ({"key_multiplier": 0}, "key_multiplier=0: expected a positive number"),
        ({"time_step_limit": [0.0, 0.1]}, "time_step_limit=.*: expected 0 and infinity"),
    ],
)
def test_what_falcon_h1_needs_is_checked(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=message):
        spec_of(tmp_path, FALCON_H1, **config)
