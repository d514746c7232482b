"""Attention and Mamba-2 beside each other: each gets the input, and the results are added."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from configs import SPEC
from msgspec.structs import replace
from small_model import make_operations
from torch import Tensor

from raycore.decoder.beside_mixer import BesideMixer
from raycore.layers.part_place import PartPlace
from raycore.models.mixers.beside import BesideSpec
from raycore.models.mixers.mamba2 import Mamba2Spec
from raycore.models.spec import ModelSpec
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.experts.parallel import SplitExperts
from raycore.weights.loader import random_decoder_weights
from raycore.weights.share import WeightShare

MAMBA = Mamba2Spec([True, True], 8, k_dim=6, v_dim=10, conv_size=3, num_groups=2, has_conv_bias=True)
LAYER = 1


class Noting:
    """Returns the first columns of what it gets, and notes for which layers. Implements `Attention`."""

    def __init__(self) -> None:
        self.layers: list[int] = []

    def begin(self, step: Any, tensors: Any) -> None: ...

    def __call__(self, layer: int, x_TX: Tensor) -> Tensor:
        self.layers.append(layer)
        return x_TX[:, : MAMBA.num_values if layer >= SPEC.num_layers else SPEC.num_heads * SPEC.head_dim].clone()


def model(**fields: Any) -> ModelSpec:
    mamba = replace(MAMBA, **{name: fields.pop(name) for name in ("norm", "multipliers") if name in fields})
    return replace(SPEC, state=BesideSpec([True, True], mamba, **fields), o_bias=True)


def mixer_of(spec: ModelSpec, adapt: Any = None) -> BesideMixer:
    ranks = TensorParallel()
    weights = random_decoder_weights(WeightShare(spec, torch.float32), seed=3).layers[LAYER].mixer
    place = PartPlace(spec, LAYER, LAYER, ranks, SplitExperts(ranks), make_operations("torch"))
    return place.make(spec.mixers[LAYER], weights)


def outcome(spec: ModelSpec) -> Tensor:
    torch.manual_seed(1)
    mixer, x_TD = mixer_of(spec), torch.randn(3, spec.hidden_size)
    return mixer.o(mixer(x_TD, Noting()))


def test_states_are_found_behind_the_layers_of_the_model() -> None:
    noting, mixer = Noting(), mixer_of(model())
    mixer(torch.randn(3, SPEC.hidden_size), noting)
    assert noting.layers == [LAYER, SPEC.num_layers + LAYER]
    assert mixer.constants.of_state.keys() == {"conv_CW", "conv_bias_C", "decay_N", "bias_N", "skip_N"}


def test_results_are_multiplied_and_added() -> None:
    plain = outcome(model())
    attention = outcome(model(mamba_multipliers=(1.0, 0.0)))
    mamba = outcome(model(attention_multipliers=(1.0, 0.0)))
    torch.testing.assert_close(plain, attention + mamba)
    scaled = outcome(model(attention_multipliers=(1.0, 0.5), mamba_multipliers=(1.0, 3.0)))
    torch.testing.assert_close(scaled, 0.5 * attention + 3.0 * mamba)


def test_inputs_are_multiplied() -> None:
    plain = outcome(model(mamba_multipliers=(1.0, 0.0)))
    halved = outcome(model(attention_multipliers=(0.5, 1.0), mamba_multipliers=(1.0, 0.0)))
    # without a bias, the stand-in of attention is linear
    bias = mixer_of(model())._attention.o.bias
    assert bias is not None
    torch.testing.assert_close(halved - bias, 0.5 * (plain - bias))


def test_outputs_of_projections_of_mamba2_are_multiplied() -> None:
    mixer = mixer_of(model(multipliers=(1.0, 2.0, 3.0, 4.0, 5.0)))._mamba
    group = MAMBA.num_groups * MAMBA.k_dim
    parts = mixer._in_multipliers_I.split([MAMBA.num_values, group, group, MAMBA.num_v_heads])  # pyright: ignore
    assert [part.unique().tolist() for part in parts] == [[2.0], [3.0], [4.0], [5.0]]
    assert not torch.equal(outcome(model()), outcome(model(multipliers=(2.0, 1.0, 1.0, 1.0, 1.0))))


@pytest.mark.parametrize("norm", ["before_gate", None])
def test_mamba2_is_normalized_before_the_gate_or_not_at_all(norm: str | None) -> None:
    assert not torch.equal(outcome(model()), outcome(model(norm=norm)))
    assert (mixer_of(model(norm=norm)).weights().mamba.norm_O is None) == (norm is None)


def test_the_output_is_a_linear_layer_that_adds_to_hidden_states() -> None:
    mixer = mixer_of(model(attention_multipliers=(1.0, 0.5), mamba_multipliers=(1.0, 3.0)))
    x_TX, h_TD = mixer(torch.randn(3, SPEC.hidden_size), Noting()), torch.randn(3, SPEC.hidden_size)
    expected = h_TD + mixer.o(x_TX)
    own, (attended_TX, values_TX) = mixer.weights(), x_TX.split([SPEC.num_heads * SPEC.head_dim, MAMBA.num_values], 1)
    summed = 0.5 * (attended_TX @ own.attention.o_DO.t() + own.attention.o_bias) + 3.0 * values_TX @ own.mamba.o_DO.t()
    torch.testing.assert_close(mixer.o(x_TX), summed, atol=1e-4, rtol=1e-4)
    assert torch.equal(mixer.o.add_to(h_TD, x_TX), expected)
