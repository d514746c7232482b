"""Where a part of a layer is that a test makes alone."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from raycore.layers.handed import Handed
from raycore.layers.operations import Operations
from raycore.layers.part_place import PartPlace
from raycore.models.layer_part import LayerPart
from raycore.models.spec import ModelSpec
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.experts.parallel import SplitExperts
from raycore.weights.loader import RankLayout
from raycore.weights.share import WeightShare
from raycore.weights.weight import Part, Weight


def place_of(spec: ModelSpec, layer: int, handed: Handed | None = None, *, batch_invariant: bool = False) -> PartPlace:
    """A layer of the model on the only rank, computed by plain torch."""
    ranks, operations = TensorParallel(), Operations(torch.device("cpu"), batch_invariant=batch_invariant)
    return PartPlace(spec, layer, layer, ranks, SplitExperts(ranks), operations, handed=handed or Handed())


def random_layout(spec: ModelSpec) -> RankLayout:
    """Makes weights of which all numbers are random."""

    def fill(out: Weight, name: str, expected_shape: tuple[int, ...], rows: Part) -> None:
        assert isinstance(out, torch.Tensor)
        out.normal_(std=0.5)

    return RankLayout(WeightShare(spec, torch.float32), lambda name: False, fill)


def random_part(spec: ModelSpec, part: LayerPart) -> Any:
    """The weights of a part, all of them random."""
    weights = random_layout(spec).part(part, "")
    assert all(isinstance(getattr(weights, field.name), torch.Tensor | int | None) for field in fields(weights))
    return weights
