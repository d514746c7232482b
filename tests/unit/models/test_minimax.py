"""What config.json of MiniMax-Text-01 means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from model_specs import spec_of

from raycore.errors import InvalidCheckpoint
from raycore.models.mixers.lightning import LightningSpec
from raycore.models.spec import BlockSum, LayerSums

MINIMAX = "MiniMaxForCausalLM"


def test_every_second_layer_of_minimax_keeps_a_state_and_types_say_otherwise(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, MINIMAX, num_hidden_layers=4, head_dim=64)
    assert spec.state == LightningSpec([False, True, False, True], 32, 64, 64)
    assert spec.layer_windows == [None] * 4
    types = ["linear_attention", "full_attention", "linear_attention"]
    typed = spec_of(tmp_path, MINIMAX, num_hidden_layers=3, layer_types=types, sliding_window=17)
    assert typed.state == LightningSpec([True, False, True], 32, 128, 128)
    assert typed.layer_windows == [17] * 3
    assert spec_of(tmp_path, MINIMAX, num_hidden_layers=1).state is None
    halves = spec_of(tmp_path, MINIMAX, num_hidden_layers=2, head_dim=64, rotary_dim=32).rotations
    assert [rotation and rotation.fraction for rotation in halves] == [0.5, 0.5]


def test_factors_of_minimax_are_those_of_a_layers_blocks(tmp_path: Path) -> None:
    factors = {"full_attn_alpha_factor": 3.5, "linear_attn_beta_factor": 2, "mlp_alpha_factor": 0.5}
    spec = spec_of(tmp_path, MINIMAX, num_hidden_layers=2, **factors)
    mlp = BlockSum(0.5, 1.0)
    assert spec.sums == [LayerSums(BlockSum(3.5, 1.0), mlp), LayerSums(BlockSum(1.0, 2.0), mlp)]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu': expected silu"),
        ({"mlp_beta_factor": 0}, "mlp_beta_factor=0: expected a positive number"),
        ({"layer_types": ["linear_attention"] * 32}, "one of these at least"),
    ],
)
def test_what_minimax_needs_is_checked(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=message):
        spec_of(tmp_path, MINIMAX, **config)
