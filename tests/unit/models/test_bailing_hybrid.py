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


def test_every_sixth_layer_of_ling_has_latent_attention(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, LING, num_hidden_layers=7, model_max_length=4096, num_experts_per_token=4)
    full = [False] * 5 + [True, False]
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
    assert (spec.moe.sparse_layers, spec.moe.num_experts_per_tok) == ([False] * 2 + [True] * 5, 4)
    types = ["full_attention" if each else "linear_attention" for each in full]
    # as transformers saves it
    saved = {"layer_types": types, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 5, "head_dim": 64}
    same = spec_of(
        tmp_path,
        LING,
        num_hidden_layers=7,
        model_max_length=4096,
        num_experts_per_token=4,
        linear_head_dim=128,
        **saved,
    )
    assert same == spec
    unlimited = spec_of(tmp_path, LING, num_hidden_layers=7, kda_safe_gate=False)
    assert isinstance(unlimited.state, KdaSpec)
    assert unlimited.state.least_decay is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kda_lower_bound": 1.0, "layer_group_size": 2}, "kda_lower_bound=1.0: expected a negative number"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu': expected silu"),
        ({"layer_types": ["linear_attention"] * 2}, "one of these at least"),
    ],
)
def test_what_ling_needs_is_checked(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=message):
        spec_of(tmp_path, LING, num_hidden_layers=2, **config)
