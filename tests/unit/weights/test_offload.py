"""Weights leave the device and return, and whatever refers to them finds them again. The device is the CPU."""

from __future__ import annotations

import functools

import pytest
import torch
from small_model import CPU, SPEC

from raycore.decoder.decoder import Decoder
from raycore.layers.operations import Operations
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.weights.loader import random_decoder_weights
from raycore.weights.offload import OffloadedTensors, tensors_of
from raycore.weights.share import WeightShare


class Collectives:
    """Has a buffer that other processes use, too."""

    def __init__(self) -> None:
        self.buffer = torch.zeros(3)

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x]


def decoder_of(*, batch_invariant: bool = False) -> Decoder:
    weights = random_decoder_weights(WeightShare(SPEC, torch.float32))
    ranks = TensorParallel(collectives=Collectives())  # pyright: ignore[reportArgumentType]
    with torch.inference_mode():
        return Decoder(SPEC, weights, ranks, Operations(CPU, batch_invariant=batch_invariant))


def num_bytes(tensors: list[torch.Tensor]) -> int:
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_offloading_finds_all_weights_of_a_decoder(batch_invariant: bool) -> None:
    weights = random_decoder_weights(WeightShare(SPEC, torch.float32))
    decoder = decoder_of(batch_invariant=batch_invariant)
    found = tensors_of(decoder, CPU)
    assert num_bytes(found) >= 4 * (decoder.num_weights + weights.embed_VD.numel())
    assert not any(each.numel() == 3 for each in found), "buffers of collectives stay"


def test_views_and_closures_of_a_weight_are_valid_after_it_is_restored() -> None:
    whole = torch.arange(12.0).view(3, 4)
    row, empty = whole[1], torch.empty(0)

    def layer() -> torch.Tensor:
        return row * 2

    partial = functools.partial(torch.add, whole)
    expected = layer(), partial(1)
    found = tensors_of({"a": [layer, partial], "b": (empty,)}, CPU)
    assert {id(each) for each in found} == {id(row), id(whole), id(empty)}
    row += 5  # a change of the weights is kept
    expected = layer(), partial(1)
    offloaded = OffloadedTensors(found)
    assert offloaded.num_bytes == 48
    assert whole.untyped_storage().nbytes() == 0
    offloaded.restore()
    assert offloaded.num_bytes == 0
    assert all(torch.equal(after, before) for after, before in zip((layer(), partial(1)), expected, strict=True))


def test_a_decoder_computes_the_same_after_its_weights_are_restored() -> None:
    decoder = decoder_of()
    hidden = torch.randn(2, SPEC.hidden_size)
    with torch.inference_mode():
        before = decoder.logits(hidden)
        offloaded = OffloadedTensors(tensors_of(decoder, CPU))
        assert offloaded.num_bytes > 0
        offloaded.restore()
        assert torch.equal(decoder.logits(hidden), before)
