"""What stands in place of a part that a layer lacks changes nothing."""

from __future__ import annotations

import torch
from configs import SPEC

from raycore.attention.spec import NoAttention
from raycore.decoder.no_parts import NoWeights, NullFeedForward, NullMixer
from raycore.layers.operations import Operations
from raycore.layers.part_place import PartPlace
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.experts.parallel import SplitExperts


def test_parts_that_a_layer_lacks_add_nothing() -> None:
    ranks = TensorParallel()
    place = PartPlace(SPEC, 0, 0, ranks, SplitExperts(ranks), Operations(torch.device("cpu")))
    mixer, feed_forward = NullMixer(place, NoWeights()), NullFeedForward(place, NoWeights())
    h_TD, x_TD = torch.randn(3, 4), torch.randn(3, 4)
    expected_TD = h_TD.clone()
    # nobody asks attention, which would fail
    out_TI = mixer(x_TD, NoAttention())
    assert torch.equal(mixer.o.add_to(h_TD, out_TI), expected_TD)
    assert torch.equal(feed_forward.add_to(h_TD, x_TD), expected_TD)
    assert torch.equal(h_TD + mixer.o(out_TI) + feed_forward.apply(x_TD), expected_TD)
    assert [*mixer.weights().named(), *feed_forward.weights().named()] == []
    assert mixer.weights().num_weights(SPEC) == 0
