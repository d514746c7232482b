"""What config.json of Nemotron-H means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from model_specs import spec_of

from raycore.errors import InvalidCheckpoint
from raycore.models.mixers.mamba2 import Mamba2Spec

NEMOTRON_H = "NemotronHForCausalLM"


def test_layers_of_nemotron_h_have_types_or_a_pattern(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, NEMOTRON_H, hybrid_override_pattern="M-*E", num_hidden_layers=52, mamba_n_groups=4)
    assert spec.num_layers == 4
    assert spec.parts_alone == ["mixer", "feed_forward", "mixer", "feed_forward"]
    assert [[*spec.norms(layer).given] for layer in range(4)] == [["norm"]] * 4
    assert isinstance(spec.state, Mamba2Spec)
    assert (spec.state.layers, spec.state.num_groups, spec.state.block) == ([True] + [False] * 3, 4, "mixer")
    assert spec.state.split_sizes == {"n_groups": 4}
    assert [mixer.is_null for mixer in spec.mixers] == [False, True, False, True]
    assert [part.is_null for part in spec.feed_forwards] == [True, False, True, False]
    assert spec.moe is not None
    assert (spec.moe.sparse_layers, spec.moe.is_gated, spec.moe.inner_size) == ([False] * 3 + [True], False, None)
    assert (spec.is_gated, spec.gate, spec.rotations) == (False, "relu2", [None] * 4)
    for types in (["mamba", "mlp", "attention", "moe"], ["linear_attention", "mlp", "full_attention", "moe"]):
        assert spec_of(tmp_path, NEMOTRON_H, layers_block_type=types, n_groups=4) == spec
    dense = spec_of(tmp_path, NEMOTRON_H, hybrid_override_pattern="M-*-", layer_norm_epsilon=1e-3, mlp_bias=True)
    assert (dense.moe, dense.rms_norm_eps, dense.mlp_bias) == (None, 1e-3, True)
    biased = spec_of(tmp_path, NEMOTRON_H, attention_bias=True)
    assert (biased.qkv_bias, biased.o_bias, biased.mlp_bias) == (True, True, False)
    assert spec_of(tmp_path, NEMOTRON_H, moe_latent_size=12, hybrid_override_pattern="*E").moe.inner_size == 12


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hybrid_override_pattern": "M-E"}, "at least one full_attention"),
        ({"hybrid_override_pattern": "M*X"}, "at least one full_attention"),
        ({"use_bias": True}, "use_bias=True: expected false"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act='gelu': expected silu"),
        ({"mlp_bias": True}, "mlp_bias=True: expected false in a model with experts"),
        ({"mlp_hidden_act": "tanh"}, "mlp_hidden_act='tanh': expected one of"),
        ({"time_step_limit": [0.0, 0.1]}, "time_step_limit=.*: expected 0 and infinity"),
        ({"mamba_dt_limit": [0.001, 0.1]}, "time_step_limit=.*: expected 0 and infinity"),
        ({"n_groups": 3}, "n_groups=3: expected a divisor of mamba_num_heads=128"),
    ],
)
def test_what_nemotron_h_needs_is_checked(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=message):
        spec_of(tmp_path, NEMOTRON_H, **config)
