"""On which nodes API servers are, and what becomes of them when nodes join and end."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from configs import make_config
from waiting import eventually

from placement.topology import ClusterView, NodeView
from raycore.errors import InvalidConfig
from raycore.server.listen_options import ListenOptions
from raycore.server.multi_process import api_servers as module
from raycore.server.multi_process.api_servers import MAX_API_SERVERS, APIServers
from raycore.server.options import ServerOptions


def node(number: int, **state: bool) -> NodeView:
    return NodeView(f"n{number}", f"10.0.0.{number}", {}, {}, **state)


class Monitor:
    """In the place of the thread that watches an API server."""

    def __init__(self, name: str, *_: Any) -> None:
        self.name = name
        self.has_given_up = self.has_left = self.has_served = False
        self.may_fail: bool | None = None

    def start(self, *, may_fail: bool = False) -> None:
        self.may_fail = may_fail

    def wait_until_serving(self) -> None:
        self.has_served = True

    def leave(self) -> None:
        self.has_left = True

    def join(self) -> None:
        pass


class Servers:
    """API servers of a cluster whose nodes the test changes. This process is on node 1."""

    def __init__(self) -> None:
        self.nodes = [node(1), node(2)]
        self.made: list[Monitor] = []
        self.started: list[APIServers] = []

    def monitor(self, *arguments: Any) -> Monitor:
        self.made.append(Monitor(*arguments))
        return self.made[-1]

    def start(self, count: int, *, on_all_nodes: bool = True) -> APIServers:
        engine: Any = SimpleNamespace(engine_infos=[SimpleNamespace(num_kv_tokens=1)], config=make_config())
        adapters: Any = None
        options = ServerOptions(("model",))
        servers = APIServers(engine, options, adapters, ListenOptions(), count, on_all_nodes=on_all_nodes)
        servers.start()
        self.started.append(servers)
        return servers

    @property
    def running(self) -> list[str]:
        return [each.name for each in self.made if not each.has_left]


@pytest.fixture
def servers(monkeypatch) -> Iterator[Servers]:
    made = Servers()
    monkeypatch.setattr(module, "_ServerMonitor", made.monitor)
    monkeypatch.setattr(module, "node_id", lambda: "n1")
    monkeypatch.setattr(module, "read_cluster", lambda: ClusterView(tuple(made.nodes)))
    monkeypatch.setattr(module, "_NODES_INTERVAL_S", 0.01)
    yield made
    for each in made.started:
        each.stop()


def test_only_this_node_has_servers_unless_all_have(servers, monkeypatch):
    monkeypatch.setattr(module, "read_cluster", lambda: pytest.fail("other nodes don't matter"))
    servers.start(2, on_all_nodes=False)
    assert servers.running == ["0", "1"]


def test_nodes_that_join_get_servers_and_those_of_nodes_that_end_are_forgotten(servers):
    servers.nodes = [node(1), node(2), node(3, draining=True), node(4, alive=False)]
    started = servers.start(2)
    assert servers.running == ["0", "1", "0 on 10.0.0.2", "1 on 10.0.0.2"]
    assert all(each.has_served and not each.may_fail for each in servers.made)
    servers.nodes = [node(1), node(2, alive=False), node(5)]
    eventually(lambda: servers.running == ["0", "1", "0 on 10.0.0.5", "1 on 10.0.0.5"])
    assert all(each.may_fail for each in servers.made[-2:]), "a node that joins may not be ready"
    started.stop()
    assert servers.running == []


def test_servers_of_a_node_that_is_drained_serve_until_it_ends(servers):
    servers.start(1)
    servers.nodes = [node(1), node(2, draining=True), node(3)]
    eventually(lambda: servers.running == ["0", "0 on 10.0.0.2", "0 on 10.0.0.3"])


def test_nodes_for_which_no_client_is_left_get_no_servers_and_this_is_said_once(servers, caplog):
    servers.nodes = [node(number) for number in range(1, MAX_API_SERVERS + 2)]
    servers.start(1)
    assert len(servers.running) == MAX_API_SERVERS
    servers.nodes[1] = node(2, alive=False)
    last = servers.nodes[-1].ip
    eventually(lambda: f"0 on {last}" in servers.running, "a place is free")
    assert [each.args[0] for each in caplog.records] == [last]


def test_an_engine_without_servers_says_so_only_when_those_of_all_nodes_are_given_up(servers):
    started = servers.start(1)
    servers.made[0].has_given_up = True
    started.check()
    servers.made[1].has_given_up = True
    with pytest.raises(RuntimeError, match="all API servers failed too often"):
        started.check()


def test_a_number_of_servers_that_ranks_cannot_have_is_refused():
    anything: Any = None
    with pytest.raises(InvalidConfig, match="api_server_count=13 isn't in"):
        APIServers(anything, ServerOptions(("model",)), anything, ListenOptions(), MAX_API_SERVERS + 1)
