"""What Ray is asked for: a rank's actor in its bundle, and a standby that reserves nothing."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest
from configs import make_config
from msgspec.structs import replace
from waiting import LONG_S

from placement.plan import EngineShape
from placement.reserve import RankBundles
from raycore.cluster import runtime
from raycore.cluster.clock import Clock
from raycore.cluster.given import GivenDevices
from raycore.cluster.runtime import Connection, RayRuntime
from raycore.config import EngineConfig, ExecutorConfig
from raycore.worker.rank import RankIdentity


class ActorClass:
    """Notes with what an actor would have been started."""

    def __init__(self) -> None:
        self.chosen: dict[str, Any] = {}
        self.arguments: tuple[Any, ...] = ()

    def options(self, **options: Any) -> ActorClass:
        self.chosen = options
        return self

    def remote(self, *arguments: Any) -> ActorClass:
        self.arguments = arguments
        return self


@pytest.fixture
def actor_cls(monkeypatch) -> ActorClass:
    monkeypatch.setattr(runtime, "checked", lambda value: value)
    return ActorClass()


@pytest.mark.parametrize(
    ("shape", "index", "num_cpus", "num_gpus", "others"),
    [
        (EngineShape(1, world_size=2, engine_cpus=1.5, gpus_per_worker=0.5), 5, 1.5, 0.0, {}),
        (EngineShape(1, world_size=1, engine_cpus=0.0, gpus_per_worker=0.5), 3, 1.0, 0.5, {}),
        (EngineShape(1, 1, 0.5, engine_cpus=0.0, others_per_worker={"a": 2.0}), 3, 0.5, 0.0, {"a": 2.0}),
    ],
    ids=["a bundle of the engine's own", "the only worker's bundle", "other resources"],
)
def test_an_engine_actor_is_scheduled_in_its_bundle(actor_cls, shape, index, num_cpus, num_gpus, others):
    group: Any = SimpleNamespace()
    bundles = RankBundles(group, range(3, 3 + len(shape.bundles)))
    identity = RankIdentity(1, 2)
    config = make_config()
    RayRuntime(actor_cls).create("raycore_ab_dp1", config, identity, bundles, shape)
    strategy = actor_cls.chosen.pop("scheduling_strategy")
    assert (strategy.placement_group, strategy.placement_group_bundle_index) == (group, index)
    amounts = {"num_cpus": num_cpus, "num_gpus": num_gpus, "resources": others}
    assert actor_cls.chosen == {"name": "raycore_ab_dp1", **amounts}
    encoded, *others = actor_cls.arguments
    assert EngineConfig.decode(encoded) == config
    assert others == [identity, bundles, "raycore_ab_dp1"]


def test_an_engine_actor_without_a_bundle_of_its_own_reserves_nothing_beside_the_first_worker(actor_cls):
    shape = EngineShape(1, world_size=2, cpus_per_worker=0, gpus_per_worker=0.5, engine_cpus=0)
    config = replace(make_config(), executor=ExecutorConfig("ray"))
    RayRuntime(actor_cls).create("dp1", config, RankIdentity(1, 2), RankBundles(SimpleNamespace(), [4, 2]), shape)
    assert actor_cls.chosen.pop("scheduling_strategy").placement_group_bundle_index == 4
    assert actor_cls.chosen == {"name": "dp1", "num_cpus": 0.0, "num_gpus": 0.0, "resources": {}}


def test_an_engine_actor_with_given_devices_reserves_nothing_on_their_node(actor_cls):
    devices = GivenDevices("12" * 28, ["3", "1"])
    RayRuntime(actor_cls).create("dp1", make_config(), RankIdentity(1, 2), devices, EngineShape(1, world_size=2))
    assert actor_cls.chosen.pop("scheduling_strategy").node_id == "12" * 28
    assert actor_cls.chosen == {"name": "dp1", "num_cpus": 0}
    assert actor_cls.arguments[1:] == (RankIdentity(1, 2, ["3", "1"]), None, "dp1")


def test_a_standby_reserves_nothing_on_its_node(actor_cls):
    RayRuntime(actor_cls).create_standby("raycore_ab_standby", make_config(), "12" * 28)
    strategy = actor_cls.chosen.pop("scheduling_strategy")
    assert (strategy.node_id, strategy.soft) == ("12" * 28, False)
    assert actor_cls.chosen == {"name": "raycore_ab_standby", "num_cpus": 0}
    assert actor_cls.arguments[1:] == (RankIdentity(-1, 1), None, "raycore_ab_standby")


def test_a_connection_says_whether_raycore_started_the_cluster(monkeypatch, actor_cls):
    asked: list[float] = []
    monkeypatch.setattr(runtime, "acquire_ray", lambda num_cpus: bool(asked.append(num_cpus)) or True)
    monkeypatch.setattr(runtime, "own_copy", lambda: None)
    monkeypatch.setattr(runtime.ray_api, "node_id", lambda: "12ab")
    monkeypatch.setattr(runtime.ray_api, "cluster_address", lambda: "10.0.0.1:6379")
    assert RayRuntime(actor_cls).connect(3.0) == Connection("12ab", "10.0.0.1:6379", is_ours=True)
    assert asked == [3.0]


def test_the_runtimes_clock_is_monotonic():
    clock = Clock()
    started_s, threads = clock.now_s(), list[Any]()
    clock.start_thread("raycore-test", lambda: threads.append(clock.now_s())).join(LONG_S)
    assert started_s <= threads[0] <= clock.now_s()


def test_ray_is_there_only_if_its_control_store_takes_connections(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as store:
        address = f"127.0.0.1:{store.getsockname()[1]}"
        monkeypatch.setattr(runtime.ray_api, "is_connected", lambda: True)
        monkeypatch.setattr(runtime.ray_api, "cluster_address", lambda: address)
        assert RayRuntime().is_connected()
        monkeypatch.setattr(runtime.ray_api, "is_connected", lambda: False)
        assert not RayRuntime().is_connected()
    monkeypatch.setattr(runtime.ray_api, "is_connected", lambda: True)
    assert not RayRuntime().is_connected()
