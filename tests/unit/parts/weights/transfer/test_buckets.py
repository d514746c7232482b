"""Buckets in Ray's store: what comes out is what was put in, and what doesn't fit is refused."""

from __future__ import annotations

import pytest
import torch

from raycore.errors import InvalidInput
from raycore.parts.weights.transfer.buckets import divided, pack_object, unpack_object

TENSORS = {
    "matrix": torch.arange(12.0).view(3, 4).to(torch.bfloat16),
    "turned": torch.arange(6.0).view(2, 3).t(),
    "number": torch.tensor(3.0),
    "nothing": torch.empty(0, 4),
}


def test_a_buckets_tensors_are_those_that_were_packed():
    found = dict(unpack_object(pack_object(list(TENSORS.items()))))
    assert list(found) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize("entry", [("matrix", "float32", (3, 4), 0), ("matrix", "bfloat16", (3, -4), 0), "matrix"])
def test_a_tensor_that_is_not_in_its_array_is_refused(entry):
    bucket = pack_object([("matrix", TENSORS["matrix"])])
    with pytest.raises(InvalidInput, match="matrix"):
        unpack_object(bucket | {"layout": [entry]})


def test_a_bucket_without_an_array_for_each_tensor_is_refused():
    bucket = pack_object(list(TENSORS.items()))
    with pytest.raises(InvalidInput, match="4 entries for 3 arrays"):
        unpack_object(bucket | {"arrays": bucket["arrays"][1:]})


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("e 0.a 0.b 1.a 1.b 2.a", "e 0.a 0.b|1.a 1.b 2.a"),
        ("0.a 0.b 1.a 1.b 1.c 2.a", "0.a 0.b|1.a 1.b 1.c|2.a"),
        ("0.a 0.b 0.c 0.d 1.a", "0.a 0.b 0.c|0.d 1.a"),
        ("0.a e f g", "0.a e f|g"),
    ],
)
def test_layers_that_fit_into_a_bucket_are_not_divided(names: str, expected: str):
    weights = [(f"model.layers.{name}" if "." in name else name, torch.zeros(8)) for name in names.split()]
    buckets = [[name.removeprefix("model.layers.") for name, _ in each] for each in divided(weights, 3 * 32)]
    assert "|".join(" ".join(bucket) for bucket in buckets) == expected
