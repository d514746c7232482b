"""A kind of feed-forward part needs a declaration, its weights and what computes it, and nothing else knows of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
import pytest
import torch
from small_model import SPEC, make_operations
from torch import Tensor
from torch.nn.functional import silu

from raycore.checkpoint.stages import layer_costs
from raycore.checkpoint.tensor_shapes import model_tensors
from raycore.decoder.decoder import Decoder
from raycore.layers.feed_forward import DenseFeedForward, FeedForward
from raycore.layers.part_place import PartPlace
from raycore.models.feed_forward import DenseSpec
from raycore.models.linears import FusedLinear
from raycore.models.rows import whole
from raycore.models.spec import ModelSpec
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.weights.layer_part_weights import MlpWeights
from raycore.weights.loader import random_decoder_weights
from raycore.weights.named import named_weights
from raycore.weights.share import WeightShare


class PairSpec(DenseSpec, frozen=True):
    """A kind that raycore doesn't have: the dense network, whose result is multiplied by that of a linear layer."""

    computed_by: ClassVar[str] = f"{__name__}.PairFeedForward"
    weights_class: ClassVar[str] = f"{__name__}.PairWeights"

    def linears(
        self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1, num_inputs: int | None = None
    ) -> tuple[FusedLinear, ...]:
        scale = FusedLinear("scale_DD", (whole("mlp.scale", model.hidden_size),), whole("", model.hidden_size))
        return (*super().linears(model, tp_rank, tp_size, num_inputs), scale)


@dataclass
class PairWeights(MlpWeights):
    scale_DD: Tensor | None = None

    NAMES: ClassVar[Mapping[str, str]] = {**MlpWeights.NAMES, "scale_DD": "mlp.scale.weight"}
    MULTIPLIED: ClassVar[tuple[str, ...]] = (*MlpWeights.MULTIPLIED, "scale_DD")


class PairFeedForward(FeedForward):
    def __init__(self, place: PartPlace, weights: PairWeights) -> None:
        self._dense = DenseFeedForward(place, weights)
        self._scale = place.operations.linear(weights.scale_DD)

    def apply(self, x_TD: Tensor) -> Tensor:
        return self._dense.apply(x_TD) * self._scale(x_TD)

    def add_to(self, residual_TD: Tensor, x_TD: Tensor) -> Tensor:
        return residual_TD + self.apply(x_TD)

    def weights(self) -> PairWeights:
        return PairWeights(**vars(self._dense.weights()), scale_DD=self._scale.weight)


def test_a_new_kind_needs_no_more_than_its_own_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = layer_costs(SPEC)[0]
    monkeypatch.setattr("raycore.models.spec.feed_forwards_of", lambda model: [PairSpec()] * model.num_layers)
    spec = msgspec.structs.replace(SPEC)
    assert layer_costs(spec)[0] == plain + spec.hidden_size**2
    names = {name for name, _ in model_tensors(spec, lambda name: False)}
    weights = random_decoder_weights(WeightShare(spec, torch.float32))
    found = {name for name, _ in named_weights(weights)}
    assert {f"model.layers.{layer}.mlp.scale.weight" for layer in range(spec.num_layers)} <= names & found
    own = weights.layers[1].feed_forward
    decoder = Decoder(spec, weights, TensorParallel(), make_operations("torch"))
    x_TD = torch.randn(3, spec.hidden_size)
    layer: Any = decoder.weight_parts.layers[1]
    gate, up = (x_TD @ own.gate_up_FD.t() + own.gate_up_bias).chunk(2, 1)
    expected = ((silu(gate) * up) @ own.down_DF.t() + own.down_bias) * (x_TD @ own.scale_DD.t())
    torch.testing.assert_close(layer.feed_forward.apply(x_TD), expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(layer.weights().feed_forward.scale_DD, own.scale_DD)
