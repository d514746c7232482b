"""What config.json of Bamba means."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_specs import spec_of

from raycore.errors import InvalidCheckpoint
from raycore.models.mixers.mamba2 import Mamba2Spec
from raycore.models.rotation import Rotation


def test_the_layers_of_bamba_with_attention_are_listed(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "BambaForCausalLM", num_hidden_layers=3, attn_layer_indices=[1])
    assert spec.state == Mamba2Spec(
        [True, False, True], 128, 256, v_dim=64, conv_size=4, num_groups=1, has_conv_bias=True
    )
    assert spec.rotations == [Rotation(10000.0, fraction=0.5)] * 3
    with pytest.raises(InvalidCheckpoint, match="one of these at least"):
        spec_of(tmp_path, "BambaForCausalLM", num_hidden_layers=3)


def test_half_of_each_head_of_bamba_is_rotated_whatever_is_beside_it(tmp_path: Path) -> None:
    layers = {"num_hidden_layers": 2, "attn_layer_indices": [1]}
    given = spec_of(tmp_path, "BambaForCausalLM", **layers, partial_rotary_factor=0.25)
    assert given.rotations == [Rotation(10000.0, fraction=0.5)] * 2
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    within = spec_of(tmp_path, "BambaForCausalLM", **layers, rope_parameters=rope, partial_rotary_factor=1.0)
    assert within.rotations == [Rotation(10000.0, fraction=0.25)] * 2
