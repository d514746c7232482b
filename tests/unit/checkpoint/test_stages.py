"""How a model's layers are divided over stages: completely, in order, and as evenly as possible."""

from itertools import combinations, pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_model import SPEC

from raycore.checkpoint.stages import Stage, layer_costs, split_layers
from raycore.errors import InvalidConfig
from raycore.models.mixers.latent import LatentHeads
from raycore.models.mixers.selecting import Indexer
from raycore.models.spec import ModelSpec
from raycore.parts.experts.models import MoeSpec, SharedExperts


def spec_of(num_layers: int, vocab_size: int = 1, sparse_layers: list[bool] | None = None) -> ModelSpec:
    moe = None if sparse_layers is None else MoeSpec(64, 8, 12, sparse_layers)
    return msgspec.structs.replace(SPEC, num_layers=num_layers, vocab_size=vocab_size, moe=moe)


def counts_of(stages: list[Stage]) -> list[int]:
    return [len(stage.layers) for stage in stages]


@pytest.mark.parametrize(
    ("spec", "num_stages", "counts"),
    [
        (spec_of(4), 1, [4]),
        (spec_of(4), 2, [2, 2]),
        (spec_of(4), 4, [1, 1, 1, 1]),
        # the head is as much as two layers and a half
        (spec_of(8, vocab_size=5 * layer_costs(spec_of(1))[0] // 64), 2, [5, 3]),
        (spec_of(8, vocab_size=5 * layer_costs(spec_of(1))[0] // 64), 3, [3, 4, 1]),
        # a head that is more than all layers: the other stages are even, too
        (spec_of(7, vocab_size=10**6), 4, [2, 2, 2, 1]),
    ],
)
def test_layers_are_divided_into_stages_of_even_work(spec: ModelSpec, num_stages: int, counts: list[int]) -> None:
    assert counts_of(split_layers(spec, num_stages)) == counts


def test_a_sparse_layer_costs_only_the_experts_of_a_token() -> None:
    spec = spec_of(6, sparse_layers=[True, True, False, False, False, False])
    sparse, dense = layer_costs(spec)[0], layer_costs(spec)[2]
    # 8 experts of 12 rows, and 64 rows of the router, beside 48 rows
    assert sparse - dense == 32 * (3 * 8 * 12 + 64 - 3 * 48)
    assert counts_of(split_layers(spec, 2)) == [2, 4]
    assert counts_of(split_layers(spec_of(8, sparse_layers=[True] * 4 + [False] * 4), 2)) == [3, 5]
    assert counts_of(split_layers(spec_of(8, sparse_layers=[False] * 4 + [True] * 4), 2)) == [5, 3]


def test_a_sparse_layer_costs_its_whole_shared_experts() -> None:
    plain = spec_of(2, sparse_layers=[True, False])
    moe = msgspec.structs.replace(plain.moe, shared=SharedExperts(10, has_gate=True))
    shared = msgspec.structs.replace(plain, moe=moe)
    assert layer_costs(shared)[0] - layer_costs(plain)[0] == 32 * (3 * 10 + 1)


@given(
    sparse_layers=st.lists(st.booleans(), min_size=1, max_size=8),
    vocab_size=st.integers(1, 1000),
    num_stages=st.integers(1, 8),
)
def test_no_division_has_a_smaller_largest_stage(sparse_layers: list[bool], vocab_size: int, num_stages: int) -> None:
    spec = spec_of(len(sparse_layers), vocab_size, sparse_layers)
    if num_stages > spec.num_layers:
        with pytest.raises(InvalidConfig, match=f"pipeline_parallel_size={num_stages} .*{spec.num_layers} layers"):
            split_layers(spec, num_stages)
        return
    stages = split_layers(spec, num_stages)
    assert [layer for stage in stages for layer in stage.layers] == list(range(spec.num_layers))
    assert all(stage.layers for stage in stages)
    assert [stage.is_first for stage in stages] == [True] + [False] * (num_stages - 1)
    assert [stage.is_last for stage in stages] == [False] * (num_stages - 1) + [True]
    costs = layer_costs(spec)
    cuts = ([0, *cut, len(costs)] for cut in combinations(range(1, len(costs)), num_stages - 1))
    best = min(max(sum(costs[a:b]) for a, b in pairwise(cut)) for cut in cuts)
    assert max(sum(costs[layer] for layer in stage.layers) for stage in stages) == best


def test_chosen_layer_counts_are_used_or_refused() -> None:
    assert counts_of(split_layers(spec_of(5), 3, [1, 3, 1])) == [1, 3, 1]
    for counts in ([2, 3], [1, 3, 2], [0, 4, 1], [1, 1, 1, 2]):
        with pytest.raises(InvalidConfig, match=f"pipeline_layers={','.join(map(str, counts))} .*5 layers"):
            split_layers(spec_of(5), 3, counts)


def selecting(shared: str) -> ModelSpec:
    """`S`: a layer that sees the tokens that the layer before it sees."""
    latent = LatentHeads(rank=8, plain_dim=6, rotated_dim=4, value_dim=6, query_rank=10)
    indexer = Indexer(2, 8, 5, is_adjacent=True, shared=[each == "S" for each in shared])
    return msgspec.structs.replace(spec_of(len(shared)), latent=latent, indexer=indexer)


def test_no_stage_begins_with_a_layer_that_needs_the_one_before_it() -> None:
    assert counts_of(split_layers(selecting("FSFSFS"), 2)) == [4, 2]
    assert counts_of(split_layers(selecting("FFSSSS"), 2)) == [1, 5]
    assert counts_of(split_layers(selecting("FFSSFS"), 2, [4, 2])) == [4, 2]
    with pytest.raises(InvalidConfig, match="can't begin with layer 3"):
        split_layers(selecting("FFSSFS"), 2, [3, 3])
    with pytest.raises(InvalidConfig, match=r"more than the 2 layers of the model that select tokens \(0, 1\)"):
        split_layers(selecting("FFSSSS"), 3)
