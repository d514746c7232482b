"""A place makes the parts of a layer, and says what adapts their linear layers."""

from __future__ import annotations

from typing import Any

import torch
from small_model import SPEC, make_operations, make_weights

from raycore.layers.part_place import PartPlace
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.experts.parallel import SplitExperts


def test_the_parts_of_a_layer_are_of_the_declared_classes_and_adapters_get_all_that_they_may_change() -> None:
    weights, ranks = make_weights().layers[1], TensorParallel()
    adapted: list[tuple[str, object]] = []

    def adapt(linear: Any, name: str, ranks: TensorParallel | None) -> Any:
        adapted.append((name, ranks))
        return linear

    place = PartPlace(SPEC, 1, 1, ranks, SplitExperts(ranks), make_operations("torch"), adapt)
    x_TD = torch.randn(3, SPEC.hidden_size)
    for part, own in ((SPEC.mixers[1], weights.mixer), (SPEC.feed_forwards[1], weights.feed_forward)):
        made = place.make(part, own)
        assert f"{type(made).__module__}.{type(made).__name__}" == part.computed_by
        assert [name for name, _ in adapted] == [*part.adapted_linears(SPEC)]
        assert [to for _, to in adapted] == [None, ranks], "outputs of all ranks are added up"
        adapted.clear()
    plain = PartPlace(SPEC, 1, 1, ranks, SplitExperts(ranks), make_operations("torch"))
    unchanged = plain.make(SPEC.feed_forwards[1], weights.feed_forward)
    assert torch.equal(unchanged.apply(x_TD), made.apply(x_TD))
