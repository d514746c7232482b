"""Attention whose projections share a tensor, in the order of key-value heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from configs import SPEC
from msgspec.structs import replace
from small_model import make_operations
from torch import Tensor

from raycore.decoder.attention_mixer import AttentionMixer
from raycore.decoder.grouped_mixer import GroupedMixer
from raycore.layers.part_place import PartPlace
from raycore.models.mixers.attention import GroupedHeads
from raycore.models.rotation import Rotation
from raycore.models.spec import TensorNames
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.adapters.weights import LoraLinear, LoraPart
from raycore.parts.experts.parallel import SplitExperts
from raycore.weights.attention_weights import AttentionWeights

HEADS, KV_HEADS, DIM = 6, 2, 8
PLAIN = replace(
    SPEC,
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=DIM,
    qkv_bias=True,
    rotations=[Rotation(10000.0, fraction=0.5)] * SPEC.num_layers,
    names=TensorNames(qkv="self_attn.qkv"),
)
GROUPED = replace(PLAIN, qkv_by_group=True)
ROWS = (HEADS + 2 * KV_HEADS) * DIM


class Returning:
    """Returns what it gets. Implements `Attention`."""

    def begin(self, step: Any, tensors: Any) -> None: ...

    def __call__(self, layer: int, x_TX: Tensor) -> Tensor:
        return x_TX


def by_group(rows_OX: Tensor) -> Tensor:
    """The rows of queries, keys and values, in the order of key-value heads."""
    q, k, v = rows_OX.split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM])
    parts = (each.view(KV_HEADS, -1, *rows_OX.shape[1:]) for each in (q, k, v))
    return torch.cat([*parts], 1).flatten(0, 1)


def weights(order: Any = lambda rows: rows) -> AttentionWeights:
    generator = torch.Generator().manual_seed(4)
    qkv, bias = torch.randn(ROWS, SPEC.hidden_size, generator=generator), torch.randn(ROWS, generator=generator)
    o = torch.randn(SPEC.hidden_size, HEADS * DIM, generator=generator)
    return AttentionWeights(order(qkv).clone(), o, order(bias).clone())


def mixer_of(spec: Any, own: AttentionWeights) -> AttentionMixer:
    ranks = TensorParallel()
    place = PartPlace(spec, 0, 0, ranks, SplitExperts(ranks), make_operations("torch"))
    return place.make(spec.mixers[0], own)


def test_rows_are_those_of_projections_of_their_own() -> None:
    x_TD = torch.randn(3, SPEC.hidden_size)
    plain, grouped = mixer_of(PLAIN, weights()), mixer_of(GROUPED, weights(by_group))
    assert isinstance(grouped, GroupedMixer)
    assert torch.equal(grouped(x_TD, Returning()), plain(x_TD, Returning()))
    kept, expected = grouped.weights(), weights(by_group)
    assert torch.equal(kept.qkv_OD, expected.qkv_OD)  # pyright: ignore
    assert torch.equal(kept.qkv_bias_O, expected.qkv_bias_O)  # pyright: ignore


def test_what_an_adapter_adds_has_the_same_order() -> None:
    b_OR = torch.arange(ROWS * 3.0).view(ROWS, 3)
    q, k, v = b_OR.t().split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], 1)
    first = [0, HEADS * DIM, (HEADS + KV_HEADS) * DIM]
    parts = [LoraPart(0, 3, at, each.contiguous()) for at, each in zip(first, (q, k, v), strict=True)]
    AttentionMixer.reorder_adapter_({"qkv": LoraLinear(torch.empty(0), tuple(parts))}, PLAIN, 0, 1)
    own = LoraPart(0, 3, 0, by_group(b_OR).t().contiguous())
    GroupedMixer.reorder_adapter_({"qkv": LoraLinear(torch.empty(0), (own,))}, GROUPED, 0, 1)
    assert torch.equal(own.b_RO, torch.cat([part.b_RO for part in parts], 1))


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_divide_key_value_heads(rank: int) -> None:
    mixer = GROUPED.mixers[0]
    assert isinstance(mixer, GroupedHeads)
    (rows,) = mixer.linears(GROUPED, rank, 2)[0].outputs
    assert rows.part == slice(rank * ROWS // 2, (rank + 1) * ROWS // 2)
    assert mixer.split_sizes == {"num_key_value_heads": KV_HEADS}
