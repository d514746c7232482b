"""The options of several servers that divide the ranks of a deployment."""

from __future__ import annotations

from typing import Any

import pytest

from raycore.config import resolve
from raycore.config.parallel import MAX_RANKS
from raycore.demo import demo_model_path
from raycore.errors import InvalidConfig


def part(**options: Any) -> tuple[int, int, int | None]:
    """The number of the engine's ranks, that of the first one, and how many are on the program's node."""
    parallel = resolve(demo_model_path(), **options).parallel
    return parallel.data_parallel_size, parallel.first_rank, parallel.num_on_own_node


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"data_parallel_rank": 2}, (1, 2, MAX_RANKS)),
        (
            {"data_parallel_rank": 0, "data_parallel_external_lb": True, "data_parallel_size_local": 1},
            (1, 0, MAX_RANKS),
        ),
        ({"data_parallel_hybrid_lb": True, "data_parallel_size_local": 2}, (2, 0, MAX_RANKS)),
        ({"data_parallel_start_rank": 2, "data_parallel_size_local": 2}, (2, 2, MAX_RANKS)),
        ({"data_parallel_hybrid_lb": True, "data_parallel_size_local": 4}, (4, 0, 4)),
        ({"data_parallel_size_local": 2}, (4, 0, 2)),
        ({"data_parallel_size_local": 0, "data_parallel_address": "10.0.0.1", "data_parallel_rpc_port": 7}, (4, 0, 0)),
        ({"data_parallel_backend": "mp"}, (4, 0, None)),
        ({"data_parallel_rank": 3, "placement_strategy": "span"}, (1, 3, None)),
        ({"data_parallel_size_local": 2, "placement_strategy": "span"}, (4, 0, None)),
    ],
)
def test_a_server_has_its_part_of_four_ranks(options, expected):
    assert part(data_parallel_size=4, **options) == expected


def test_one_rank_needs_no_deployment():
    assert part(data_parallel_rank=0) == (1, 0, None)
    assert part(data_parallel_external_lb=True) == (1, 0, None)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"data_parallel_rank": 4}, "no rank 4: data_parallel_rank=4"),
        ({"data_parallel_start_rank": 3, "data_parallel_size_local": 2}, "no ranks 3 to 4"),
        ({"data_parallel_external_lb": True}, "needs data_parallel_rank"),
        ({"data_parallel_external_lb": True, "data_parallel_hybrid_lb": True}, "exclude each other"),
        ({"data_parallel_hybrid_lb": True}, "needs data_parallel_size_local"),
        ({"data_parallel_hybrid_lb": True, "data_parallel_size_local": 0}, "at least 1"),
        ({"data_parallel_start_rank": 1}, "needs data_parallel_size_local"),
        ({"data_parallel_rank": 1, "data_parallel_size_local": 2}, "has one rank"),
        ({"data_parallel_rank": 1, "data_parallel_hybrid_lb": True}, "has one rank"),
        ({"data_parallel_rank": -1}, "data_parallel_rank=-1"),
        ({"data_parallel_size_local": 5}, "data_parallel_size_local=5 is more than data_parallel_size=4"),
    ],
)
def test_options_that_contradict_each_other_are_named(options, named):
    with pytest.raises(InvalidConfig, match=named):
        part(data_parallel_size=4, **options)


def test_experts_are_shared_by_several_servers():
    from raycore.config.deployment import deployed
    from raycore.config.parallel import ParallelConfig

    options = {"enable_expert_parallel": True, "data_parallel_size": 4}
    whole = deployed(ParallelConfig(**options))
    assert (whole.num_sharing, whole.num_ranks_of_servers, whole.is_lockstep) == (4, 0, True)
    one = deployed(ParallelConfig(**options, data_parallel_rank=1))
    assert (one.data_parallel_size, one.num_sharing, one.num_ranks_before, one.is_lockstep) == (1, 4, 1, True)
    node = deployed(ParallelConfig(**options, data_parallel_start_rank=2, data_parallel_size_local=2))
    assert (node.data_parallel_size, node.num_sharing, node.num_ranks_before) == (2, 4, 2)
    alone = deployed(ParallelConfig(data_parallel_size=4, data_parallel_rank=1))
    assert (alone.num_sharing, alone.num_ranks_of_servers, alone.is_lockstep) == (1, 0, False)
