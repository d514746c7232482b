"""What config.json of Mamba-2 alone means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from model_specs import spec_of

from raycore.errors import InvalidCheckpoint, InvalidConfig
from raycore.models.mixers.mamba2 import Mamba2Spec

MAMBA2 = "Mamba2ForCausalLM"


def test_all_layers_of_mamba2_keep_a_state_and_no_more(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, MAMBA2, num_hidden_layers=2, layer_norm_epsilon=1e-3)
    assert spec.mixer_kinds == [spec.state]
    assert isinstance(spec.state, Mamba2Spec)
    assert (spec.state.num_v_heads, spec.state.v_dim, spec.state.k_dim, spec.state.num_groups) == (128, 64, 128, 8)
    assert [part.is_null for part in spec.feed_forwards] == [True, True]
    assert [spec.norms(layer).given for layer in range(2)] == [["norm"], ["norm"]]
    assert spec.rms_norm_eps == 1e-3
    assert all(mixer.cached_numbers(spec, 1) == 0 for mixer in spec.mixers)


def test_ranks_divide_the_groups_of_mamba2_or_the_heads_of_a_single_one(tmp_path: Path) -> None:
    spec_of(tmp_path, MAMBA2).check_tensor_parallel(8)
    with pytest.raises(InvalidConfig, match=r"n_groups=8: choose one of \[1, 2, 4, 8\]"):
        spec_of(tmp_path, MAMBA2).check_tensor_parallel(16)
    spec_of(tmp_path, MAMBA2, n_groups=1).check_tensor_parallel(16)
    with pytest.raises(InvalidConfig, match="num_heads=128"):
        spec_of(tmp_path, MAMBA2, n_groups=1).check_tensor_parallel(3)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_bias": True}, "use_bias=True: expected false"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu': expected silu"),
        ({"n_groups": 3}, "n_groups=3: expected a divisor of num_heads=128"),
        ({"expand": 1}, "num_heads=128: expected expand times hidden_size, 4096, divided by head_dim"),
        ({"time_step_limit": [0.0, 0.1]}, "time_step_limit=.*: expected 0 and infinity"),
    ],
)
def test_what_mamba2_needs_is_checked(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=message):
        spec_of(tmp_path, MAMBA2, **config)
