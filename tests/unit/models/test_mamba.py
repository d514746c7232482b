"""What config.json of Mamba, Falcon-Mamba and Jamba means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from model_specs import spec_of

from raycore.errors import InvalidCheckpoint, InvalidConfig
from raycore.models.mixers.mamba1 import Mamba1Spec

MAMBA, FALCON, JAMBA = "MambaForCausalLM", "FalconMambaForCausalLM", "JambaForCausalLM"


def state_of(tmp_path: Path, architecture: str, **config: Any) -> Mamba1Spec:
    state = spec_of(tmp_path, architecture, **config).state
    assert isinstance(state, Mamba1Spec)
    return state


def test_all_layers_of_mamba_keep_a_state_and_no_more(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, MAMBA, num_hidden_layers=2, layer_norm_epsilon=1e-3)
    assert spec.mixer_kinds == [spec.state]
    assert [part.is_null for part in spec.feed_forwards] == [True, True]
    assert [spec.norms(layer).given for layer in range(2)] == [["norm"], ["norm"]]
    assert spec.rms_norm_eps == 1e-3
    assert all(mixer.cached_numbers(spec, 1) == 0 for mixer in spec.mixers)


def test_the_number_of_channels_may_be_given(tmp_path: Path) -> None:
    state = state_of(tmp_path, MAMBA, hidden_size=100, expand=3)
    assert (state.num_channels, state.time_size, state.state_size, state.norms) == (300, 7, 16, None)
    # as in Falcon-Mamba's file
    falcon = state_of(tmp_path, FALCON, hidden_size=4096, expand=16, intermediate_size=8192, time_step_rank=256)
    assert (falcon.num_channels, falcon.time_size, falcon.norms, falcon.norm_eps) == (8192, 256, "bare", 1e-6)


def test_ranks_divide_channels(tmp_path: Path) -> None:
    spec_of(tmp_path, MAMBA, hidden_size=768).check_tensor_parallel(8)
    with pytest.raises(InvalidConfig, match="doesn't divide the model's expand times hidden_size=1536"):
        spec_of(tmp_path, MAMBA, hidden_size=768).check_tensor_parallel(5)


def test_layers_of_jamba_have_attention_or_a_state_and_experts_or_not(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, JAMBA, num_hidden_layers=6, hidden_size=64, attn_layer_period=3, attn_layer_offset=1)
    assert [mixer.keeps_state for mixer in spec.mixers] == [True, False, True, True, False, True]
    assert [part.has_experts for part in spec.feed_forwards] == [False, True] * 3
    assert spec.rotations == [None] * 6
    state = spec.state
    assert isinstance(state, Mamba1Spec)
    assert (state.num_channels, state.time_size, state.norms, state.norm_eps) == (128, 4, "weighted", 1e-6)
    assert spec.moe is not None
    assert (spec.moe.num_experts, spec.moe.router.is_normalized) == (16, False)
    # with one expert, or as many as layers that have attention, there is nothing to choose
    assert spec_of(tmp_path, JAMBA, num_experts=1, num_experts_per_tok=1).moe is None
    assert spec_of(tmp_path, JAMBA, attn_layer_period=1, attn_layer_offset=0).state is None


@pytest.mark.parametrize(
    ("architecture", "config", "message"),
    [
        (MAMBA, {"hidden_act": "gelu"}, "hidden_act='gelu': expected silu"),
        (MAMBA, {"time_step_rank": "half"}, "time_step_rank='half': expected an integer"),
        (MAMBA, {"conv_kernel": 1}, "conv_kernel=1: expected an integer, at least 2"),
        (FALCON, {"mixer_rms_eps": 0}, "mixer_rms_eps=0: expected a positive number"),
        (JAMBA, {"hidden_act": "gelu"}, "hidden_act='gelu': expected silu"),
        (JAMBA, {"mamba_dt_rank": None}, "mamba_dt_rank is missing: expected an integer"),
        (JAMBA, {"attn_layer_offset": 8}, "attn_layer_offset=8: expected a number below attn_layer_period=8"),
        (JAMBA, {"expert_layer_offset": 2}, "expert_layer_offset=2: expected a number below expert_layer_period=2"),
        (JAMBA, {"num_experts_per_tok": 17}, "num_experts_per_tok=17: expected at most the model's 16 experts"),
    ],
)
def test_what_mamba1_needs_is_checked(tmp_path: Path, architecture: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=message):
        spec_of(tmp_path, architecture, **config)
