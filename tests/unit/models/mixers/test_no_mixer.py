"""A layer without a mixer keeps and needs nothing, and has no norms for one."""

from __future__ import annotations

import msgspec
from configs import SPEC

from raycore.models.mixers.no_mixer import NO_MIXER


def test_a_layer_without_a_mixer_keeps_nothing() -> None:
    model = msgspec.structs.replace(SPEC, parts_alone=["feed_forward", None])
    first, second = model.mixers
    assert (first, second.is_null) == (NO_MIXER, False)
    assert model.mixer_kinds == [second, NO_MIXER]
    assert (first.linears(model), first.vectors(model), first.state(1), first.num_weights(model)) == ((), (), (), 0)
    assert (first.cached(model, 0).kind, first.cached_numbers(model, 1)) == ("none", 0)
    assert [model.norms(layer).given for layer in (0, 1)] == [
        ["post_attention_layernorm"],
        ["input_layernorm", "post_attention_layernorm"],
    ]


def test_a_layer_without_a_feed_forward_part_has_no_norm_for_it() -> None:
    model = msgspec.structs.replace(SPEC, parts_alone=["mixer", None])
    first, second = model.feed_forwards
    assert (first.is_null, first.linears(model), second.is_null) == (True, (), False)
    assert model.norms(0).given == ["input_layernorm"]
    assert model.mixer_kinds == [model.mixers[0]]
