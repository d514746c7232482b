"""Attention and Mamba-2 beside each other: what a layer keeps, and what its ranks hold."""

from __future__ import annotations

from configs import SPEC
from msgspec.structs import replace

from raycore.models.mixers.attention import AttentionHeads
from raycore.models.mixers.beside import BesideSpec
from raycore.models.mixers.mamba2 import Mamba2Spec
from raycore.models.mixers.spec import Cached

MAMBA = Mamba2Spec([True, False], 8, k_dim=6, v_dim=10, conv_size=3, num_groups=2, has_conv_bias=True, norm=None)
BESIDE = BesideSpec([True, False], MAMBA)
MODEL = replace(SPEC, state=BESIDE, layer_windows=[7, None])


def test_a_layer_keeps_keys_and_values_and_a_state() -> None:
    assert MODEL.mixers == [BESIDE, *MODEL.attentions]
    assert isinstance(MODEL.mixers[1], AttentionHeads)
    assert BESIDE.keeps_state
    assert BESIDE.cached(MODEL, 0) == Cached("window", 7)
    assert BESIDE.cached_numbers(MODEL, 2) == MODEL.attentions[0].cached_numbers(MODEL, 2) > 0
    assert BESIDE.state(2) == MAMBA.state(2)
    assert BESIDE.of_rank(2) == MAMBA.of_rank(2)
    assert MODEL.keeps_states
    assert BESIDE.split_sizes == {"mamba_n_groups": 2}


def test_the_tensors_are_those_of_both() -> None:
    parts = MODEL.attentions[0], MAMBA
    assert BESIDE.tensors(MODEL) == parts[0].tensors(MODEL) | parts[1].tensors(MODEL)
    assert BESIDE.num_weights(MODEL) == sum(part.num_weights(MODEL) for part in parts)
    linears = BESIDE.linears(MODEL, 1, 2)
    assert [linear.field for linear in linears] == ["qkv_OD", "o_DO", "in_ID", "z_OD", "o_DO"]
    assert list(linears) == [linear for part in parts for linear in part.linears(MODEL, 1, 2)]
    assert [*BESIDE.adapted_linears(MODEL)] == ["qkv", "o"]
    assert BESIDE.sizes(MODEL, 2) == parts[0].sizes(MODEL, 2)
