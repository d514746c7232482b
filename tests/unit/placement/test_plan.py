"""Planning puts ranks where the strategies say, and shortages say what is missing."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.errors import PlacementShortage
from placement.plan import EngineShape, describe_missing, describe_shortage, evener_node, plan_ranks
from placement.topology import ClusterView, NodeView


def view(*nodes: tuple[float, float], free: tuple[tuple[float, float], ...] | None = None) -> ClusterView:
    """Nodes a, b, … of (CPU, GPU), all of it free unless `free` says otherwise."""
    return ClusterView(
        tuple(
            NodeView(
                "abcdefgh"[i], f"10.0.0.{i}", {"CPU": cpu, "GPU": gpu}, dict(zip(("CPU", "GPU"), left, strict=True))
            )
            for i, ((cpu, gpu), left) in enumerate(zip(nodes, free or nodes, strict=True))
        )
    )


def where(view: ClusterView, shape: EngineShape, of: str = "available") -> list[str]:
    """The nodes of each rank's bundles, as one word."""
    return ["".join(plan.node_ids) for plan in plan_ranks(view, shape, of=of)]


def gpu_shape(num_ranks: int, world_size: int, strategy: str = "fill", **kwargs: int) -> EngineShape:
    return EngineShape(num_ranks, world_size, gpus_per_worker=1, strategy=strategy, **kwargs)


def test_a_ranks_bundles_are_those_of_its_workers_and_then_its_engines():
    shape = gpu_shape(1, 2)
    assert shape.bundles == ({"CPU": 1.0, "GPU": 1}, {"CPU": 1.0, "GPU": 1}, {"CPU": 1.0})
    assert shape.engine_bundle_index == 2


def test_an_inline_engine_shares_its_workers_bundle():
    shape = EngineShape(3, 1, engine_cpus=0)
    assert shape.bundles == ({"CPU": 1.0},)
    assert shape.engine_bundle_index == 0
    assert shape.num_cpus == 3


@pytest.mark.parametrize(
    ("shape", "nodes", "expected"),
    [
        pytest.param(EngineShape(2, 2), [(6, 0)], ["aaa", "aaa"], id="one node holds all"),
        pytest.param(gpu_shape(4, 2), [(8, 4), (8, 4)], ["aaa", "aaa", "bbb", "bbb"], id="fill: node after node"),
        pytest.param(gpu_shape(3, 2), [(8, 4), (8, 4)], ["aaa", "aaa", "bbb"], id="fill: unevenly"),
        pytest.param(gpu_shape(1, 2), [(8, 0), (8, 2)], ["bbb"], id="fill: skips a node without GPUs"),
        pytest.param(gpu_shape(2, 2, "strict"), [(8, 4), (8, 4)], ["aaa", "bbb"], id="strict: evenly"),
        pytest.param(
            gpu_shape(4, 1, "strict"),
            [(8, 4), (8, 4), (8, 4)],
            ["aa", "aa", "bb", "bb"],
            id="strict: a divisor of the ranks",
        ),
        pytest.param(
            gpu_shape(4, 1, "strict"),
            [(8, 4), (8, 1), (8, 4)],
            ["aa", "aa", "cc", "cc"],
            id="strict: skips a small node",
        ),
        pytest.param(gpu_shape(3, 1, "strict"), [(8, 3), (8, 2)], ["aa", "aa", "aa"], id="strict: one node is even"),
        pytest.param(gpu_shape(1, 4, "span"), [(8, 2), (8, 4)], ["bbbbb"], id="span: not where one node does"),
        pytest.param(gpu_shape(1, 4, "span"), [(8, 2), (8, 2)], ["aabba"], id="span: over two nodes"),
        pytest.param(
            gpu_shape(1, 4, "span", tensor_parallel_size=2), [(8, 3), (8, 2)], ["aabba"], id="span: groups stay whole"
        ),
        pytest.param(
            gpu_shape(1, 4, "span", tensor_parallel_size=4),
            [(8, 3), (8, 2)],
            ["aaaba"],
            id="span: a group that must split",
        ),
        pytest.param(gpu_shape(2, 2, "span"), [(4, 4), (8, 0)], ["aab", "aab"], id="span: engines give way to workers"),
        pytest.param(gpu_shape(1, 2, "span"), [(2, 2), (3, 2)], ["bbb"], id="span: the node that holds the engine too"),
        pytest.param(EngineShape(2, 1, engine_cpus=0), [(1, 0), (1, 0)], ["a", "b"], id="inline"),
        pytest.param(EngineShape(3, 1, cpus_per_worker=0.1, engine_cpus=0), [(0.3, 0)], ["a"] * 3, id="fractions"),
    ],
)
def test_ranks_are_placed_on_nodes_by_the_strategy(
    shape: EngineShape, nodes: list[tuple[float, float]], expected: list[str]
):
    assert where(view(*nodes), shape) == expected


@pytest.mark.parametrize(
    ("shape", "nodes"),
    [
        pytest.param(gpu_shape(2, 4), [(16, 6), (16, 2)], id="fill: no rank spans nodes"),
        pytest.param(gpu_shape(3, 1, "strict"), [(8, 2), (8, 1)], id="strict: never unevenly"),
        pytest.param(gpu_shape(1, 5, "span"), [(8, 2), (8, 2)], id="span: too few GPUs in all"),
        pytest.param(gpu_shape(1, 2, "span"), [(2, 2)], id="span: no CPU left for the engine"),
        pytest.param(EngineShape(1, 1), [], id="no node"),
    ],
)
def test_ranks_that_do_not_fit_are_a_placement_shortage(shape: EngineShape, nodes: list[tuple[float, float]]):
    with pytest.raises(PlacementShortage):
        plan_ranks(view(*nodes), shape)


def test_dead_and_draining_nodes_get_no_rank():
    resources = {"CPU": 8.0}
    nodes = (
        NodeView("a", "10.0.0.0", resources, resources, alive=False),
        NodeView("b", "10.0.0.1", resources, resources, draining=True),
        NodeView("c", "10.0.0.2", resources, resources),
    )
    assert where(ClusterView(nodes), EngineShape(2, 1)) == ["cc", "cc"]


def test_resources_in_use_are_left_out_only_in_plans_of_free_resources():
    busy = view((4, 0), free=((1, 0),))
    assert where(busy, EngineShape(1, 1), of="total") == ["aa"]
    with pytest.raises(PlacementShortage):
        plan_ranks(busy, EngineShape(1, 1))


def test_a_rank_on_one_node_is_packed_strictly():
    assert [plan.group_strategy for plan in plan_ranks(view((8, 2), (8, 4)), gpu_shape(2, 3, "span"))] == [
        "STRICT_PACK",
        "PACK",
    ]


def test_a_shortage_is_described_by_the_request_and_a_table_of_the_nodes():
    text = describe_shortage(view((8, 4), (16, 2), free=((8, 1), (16, 2))), gpu_shape(3, 2))
    assert text.splitlines() == [
        "3 ranks of 2 workers don't fit the cluster (strategy 'fill': each on one node)",
        "each rank needs 2 workers of CPU 1 GPU 1, an engine of CPU 1; in total: CPU 9 GPU 6",
        "  node  address   CPU free/total  GPU free/total  ranks now/ever",
        "  a     10.0.0.0  8/8             1/4             0/2",
        "  b     10.0.0.1  16/16           2/2             1/1",
        "Request fewer ranks or workers, let ranks span nodes (strategy 'span'), free resources, or add nodes.",
    ]


def test_the_description_of_a_wait_names_the_placed_ranks_and_the_needs_of_the_missing():
    standing = {"raycore_1_dp0": ["0123456789ab", "0123456789ab"]}
    text = describe_missing(view((8, 4), free=((5, 2),)), gpu_shape(3, 2), standing)
    assert text.splitlines() == [
        "1 of 3 ranks placed (raycore_1_dp0 on 01234567)",
        "each missing rank needs 2 workers of CPU 1 GPU 1, an engine of CPU 1; in total: CPU 6 GPU 4",
        "  node  address   CPU free/total  GPU free/total  ranks now/ever",
        "  a     10.0.0.0  5/8             2/4             1/2",
    ]
    assert describe_missing(view(), gpu_shape(1, 1), {}).splitlines()[:2] == [
        "0 of 1 rank placed",
        "each missing rank needs 1 worker of CPU 1 GPU 1, an engine of CPU 1; in total: CPU 2 GPU 1",
    ]


@given(
    nodes=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 4)), min_size=1, max_size=4),
    num_ranks=st.integers(1, 4),
    world_size=st.integers(1, 4),
    strategy=st.sampled_from(["strict", "fill", "span"]),
)
def test_a_plan_never_takes_more_than_the_nodes_have(
    nodes: list[tuple[int, int]], num_ranks: int, world_size: int, strategy: str
):
    cluster = view(*nodes)
    shape = gpu_shape(num_ranks, world_size, strategy)
    try:
        plans = plan_ranks(cluster, shape)
    except PlacementShortage:
        return
    used: Counter[tuple[str, str]] = Counter()
    for plan in plans:
        assert len(plan.node_ids) == len(plan.bundles) == world_size + 1
        assert strategy == "span" or len(set(plan.node_ids)) == 1
        for node_id, bundle in zip(plan.node_ids, plan.bundles, strict=True):
            used.update({(node_id, name): amount for name, amount in bundle.items()})
    for node in cluster.nodes:
        assert all(used[node.node_id, name] <= amount for name, amount in node.total.items())
    assert [plan.dp_rank for plan in plans] == list(range(num_ranks))
    if strategy == "strict":
        assert len(set(Counter(plan.node_ids[0] for plan in plans).values())) == 1


@pytest.mark.parametrize(
    ("num_ranks", "nodes", "standing", "expected"),
    [
        pytest.param(1, [(4, 0), (4, 0)], {"a": 1}, ["b"], id="a node that has come back"),
        pytest.param(2, [(4, 0), (4, 0)], {"a": 2}, ["b", "b"], id="as many on the new node"),
        pytest.param(2, [(4, 0), (4, 0)], {"a": 1, "b": 1}, ["a", "b"], id="one more on each"),
        pytest.param(
            2, [(4, 0), (4, 0), (4, 0)], {"a": 2}, ["b", "b"], id="two nodes evenly rather than three unevenly"
        ),
        pytest.param(1, [(4, 0), (4, 0)], {"a": 2}, ["b"], id="not evenly: the emptier one"),
        pytest.param(1, [(4, 0), (0, 0)], {"a": 1}, ["a"], id="packed where nothing else has room"),
        pytest.param(1, [(0, 0), (4, 0), (4, 0)], {"a": 1, "b": 1}, ["c"], id="the third of three"),
        pytest.param(2, [(2, 0), (4, 0)], {"a": 1, "x": 1}, ["a", "b"], id="with a node that takes no more ranks"),
    ],
)
def test_strict_spreads_later_ranks_evenly_with_those_in_place(num_ranks, nodes, standing, expected):
    shape = EngineShape(num_ranks, 1, engine_cpus=0, strategy="strict")
    placed = plan_ranks(view(*nodes), shape, standing=standing)
    assert sorted("".join(plan.node_ids) for plan in placed) == expected


def test_strategies_other_than_strict_ignore_ranks_in_place():
    assert where(view((4, 0), (4, 0)), EngineShape(1, 1, engine_cpus=0)) == ["a"]
    assert [plan.node_ids for plan in plan_ranks(view((4, 0), (4, 0)), EngineShape(1, 1), standing={"a": 1})] == [
        ("a", "a")
    ]


@pytest.mark.parametrize(
    ("standing", "free", "expected"),
    [
        pytest.param({"a": 2}, 4, "b", id="an empty node"),
        pytest.param({"a": 2, "b": 1}, 4, None, id="moving would help nobody"),
        pytest.param({"a": 3, "b": 1}, 4, "b", id="a node with two fewer"),
        pytest.param({"a": 2}, 0, None, id="an empty node without room"),
    ],
)
def test_a_rank_that_is_restarted_leaves_a_crowded_node_for_an_emptier_one(standing, free, expected):
    shape = EngineShape(1, 1, engine_cpus=0, strategy="strict")
    assert evener_node(view((4, 0), (4, 0), free=((2, 0), (free, 0))), shape, "a", standing) == expected


def test_ranks_can_be_kept_on_one_node():
    assert where(view((8, 0), (8, 0)), EngineShape(2, 1, node_id="b")) == ["bb", "bb"]
    with pytest.raises(PlacementShortage, match="all on this program's node, b"):
        plan_ranks(view((8, 0), (2, 0)), EngineShape(2, 1, node_id="b"))
    assert evener_node(view((8, 0), (8, 0)), EngineShape(1, 1, strategy="strict", node_id="a"), "a", {"a": 3}) is None


@pytest.mark.parametrize(
    ("strategy", "num_there", "expected"),
    [
        ("fill", 0, ["a", "c", "c"]),
        ("fill", 1, ["b", "a", "c"]),
        ("fill", 3, ["b", "b", "b"]),
        ("strict", 1, ["b", "a", "c"]),
        ("span", 2, ["b", "b", "a"]),
    ],
)
def test_some_ranks_can_be_kept_on_one_node_and_all_others_off_it(strategy, num_there, expected):
    shape = EngineShape(3, 1, engine_cpus=0, strategy=strategy, node_id="b", num_there=num_there)
    assert where(view((1, 0), (4, 0), (4, 0)), shape) == expected


def test_a_node_without_room_for_its_ranks_is_named_and_none_moves_onto_it_or_off_it():
    shape = EngineShape(3, 1, engine_cpus=0, strategy="strict", node_id="b", num_there=2)
    with pytest.raises(PlacementShortage, match="2 on this program's node, b, the others on other nodes"):
        plan_ranks(view((8, 0), (1, 0)), shape)
    with pytest.raises(PlacementShortage):
        plan_ranks(view((0, 0), (8, 0)), shape)
    nodes = view((8, 0), (8, 0), (8, 0))
    assert evener_node(nodes, shape, "b", {"b": 5}) is None
    assert evener_node(nodes, shape, "a", {"a": 3, "c": 2}) is None
    assert evener_node(nodes, shape, "a", {"a": 3}) == "c"
    standing = {"b": 2, "a": 2}
    assert [
        plan.node_ids
        for plan in plan_ranks(
            nodes, EngineShape(2, 1, engine_cpus=0, strategy="strict", node_id="b", num_there=0), standing=standing
        )
    ] == [("c",), ("c",)]
