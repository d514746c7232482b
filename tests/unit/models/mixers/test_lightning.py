"""Lightning attention: what computes it, and what its ranks hold."""

from __future__ import annotations

from configs import SPEC
from msgspec.structs import replace

from raycore.models.mixers.lightning import LightningSpec
from raycore.models.mixers.mamba2 import Mamba2Spec

LIGHTNING = LightningSpec([True, False], 4, 6, 6)
MODEL = replace(SPEC, state=LIGHTNING)


def test_mamba2_computes_it_with_a_group_for_each_head_and_times_of_one() -> None:
    own = LIGHTNING.of_rank(2)
    assert isinstance(own, Mamba2Spec)
    assert (own.num_v_heads, own.num_groups, own.k_dim, own.v_dim) == (2, 2, 6, 6)
    assert (own.least_time, own.longest_time, own.has_conv_bias) == (1.0, 1.0, False)
    assert own.num_channels == LIGHTNING.num_channels // 2
    assert LIGHTNING.state(2) == own.state(1)
    assert LIGHTNING.split_sizes == {"num_attention_heads": 4}


def test_adapters_may_change_all_projections_of_which_ranks_divide_heads() -> None:
    hidden = MODEL.hidden_size
    assert LIGHTNING.adapted_shapes(MODEL) == {
        "self_attn.qkv_proj": (72, hidden),
        "self_attn.output_gate": (24, hidden),
        "self_attn.out_proj": (hidden, 24),
    }
    qkv, gate, o = LIGHTNING.linears(MODEL, 1, 2)
    assert [linear.outputs[0].part for linear in (qkv, gate)] == [slice(36, 72), slice(12, 24)]
    assert (o.inputs.part, o.reads_divided) == (slice(12, 24), True)
    (norm,) = LIGHTNING.vectors(MODEL, 1, 2)
    assert norm.parts[0].part == slice(12, 24)
