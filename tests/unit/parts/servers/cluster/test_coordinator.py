"""Servers begin rounds together, and a round is over when one of its servers fails, ends or joins."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from waiting import LONG_S, eventually

from raycore.errors import InvalidConfig
from raycore.parts.servers.cluster import coordinator as module
from raycore.parts.servers.cluster.coordinator import Coordinator
from raycore.parts.servers.values import Place, RoundOver, SharingServer
from raycore.same_copy import seal


def server(number: int, num_ranks: int = 1, total: int = 2, name: str = "", **options: Any) -> SharingServer:
    """The server whose first rank has this number."""
    has_served = options.pop("has_served", False)
    return SharingServer(
        name or f"s{number}", number, num_ranks, total, has_served, f"w{number}", "node", {"tp": "1", **options}
    )


class Deployment:
    """A coordinator, and servers that call it from threads of their own."""

    def __init__(self) -> None:
        self.gone: set[str] = set()
        self.coordinator = Coordinator("test", lambda server: server.server_id not in self.gone)
        self._pool = ThreadPoolExecutor()

    def come(self, comer: SharingServer, timeout_s: float = LONG_S) -> Any:
        return self._pool.submit(self.coordinator.come, seal(msgspec.msgpack.encode(comer)), timeout_s)

    def do(self, call: Any, *args: Any) -> Any:
        return self._pool.submit(call, *args)

    def begin(self, *servers: SharingServer) -> list[Place]:
        """All of them come."""
        return [each.result(LONG_S) for each in [self.come(each) for each in servers]]

    def close(self) -> None:
        self.gone = {f"s{number}" for number in range(9)}
        self.coordinator.look()
        self._pool.shutdown()


@pytest.fixture
def deployment():
    made = Deployment()
    yield made
    made.close()


def test_the_first_round_begins_when_all_ranks_are_there_in_their_order(deployment):
    late = deployment.come(server(0, 2, total=3), 0.01)
    assert late.result(LONG_S) is None
    second = deployment.come(server(2, 1, total=3))
    first = deployment.come(server(0, 2, total=3))
    one, two = first.result(LONG_S), second.result(LONG_S)
    assert (one.num_ranks, one.num_before, one.is_first) == (3, 0, True)
    assert (two.num_ranks, two.num_before, two.is_first) == (3, 2, False)
    assert one.round_id == two.round_id
    assert deployment.coordinator.watch(one.round_id, 0.01) == ""


@pytest.mark.parametrize("how", ["ends", "is gone", "starts its ranks again"])
def test_servers_that_are_left_begin_the_next_round_without_the_one_that_ends(deployment, how):
    a, b, c = (server(number, total=3) for number in range(3))
    before, _, _ = deployment.begin(a, b, c)
    told = deployment.do(deployment.coordinator.watch, before.round_id, LONG_S)
    if how == "ends":
        deployment.coordinator.leave("s1")
    elif how == "is gone":
        deployment.gone.add("s1")
        deployment.coordinator.look()
    else:
        again = deployment.come(b)
    assert told.result(LONG_S) == f"the server with rank 1 {how}"
    if how == "starts its ranks again":
        deployment.begin(a, c)
        assert again.result(LONG_S).num_ranks == 3
        return
    places = deployment.begin(a, c)
    assert [(place.num_ranks, place.num_before) for place in places] == [(2, 0), (2, 1)]
    assert places[0].round_id != before.round_id
    assert deployment.coordinator.watch(before.round_id, LONG_S), "that round stays over"


def test_a_server_that_joins_ends_the_round_and_waits_until_the_others_come(deployment):
    a, b = server(0), server(1)
    deployment.begin(a, b)
    deployment.coordinator.leave("s1")
    (alone,) = deployment.begin(a)
    assert (alone.num_ranks, alone.is_first) == (1, True)
    joins = deployment.come(msgspec.structs.replace(b, server_id="s3"))
    assert deployment.coordinator.watch(alone.round_id, LONG_S) == "the server with rank 1 joins the others"
    assert not joins.done()
    (place,) = deployment.begin(a)
    assert place.num_ranks == joins.result(LONG_S).num_ranks == 2


def test_a_server_that_goes_while_others_wait_for_it_is_not_waited_for(deployment):
    a, b, c = (server(number, total=3) for number in range(3))
    before, _, _ = deployment.begin(a, b, c)
    deployment.coordinator.end(before.round_id, "a rank has died")
    assert deployment.coordinator.watch(before.round_id, LONG_S) == "a rank has died"
    waiting = [deployment.come(a), deployment.come(c)]
    eventually(lambda: {"s0", "s2"} <= deployment.coordinator._here)
    deployment.gone.add("s1")
    deployment.coordinator.look()
    assert [each.result(LONG_S).num_ranks for each in waiting] == [2, 2]


def test_servers_that_have_served_need_not_be_complete_with_a_new_coordinator(deployment, monkeypatch):
    monkeypatch.setattr(module, "_GRACE_S", 0.2)
    ones = [server(number, total=3, has_served=True) for number in (0, 2)]
    assert [deployment.come(each, 0.0).result(LONG_S) for each in ones] == [None, None]
    places = eventually(lambda: [place for each in ones if (place := deployment.come(each, 0.05).result(LONG_S))])
    assert places[0].num_ranks == 2


def test_a_place_that_came_too_late_for_a_call_is_told_to_the_next_one(deployment):
    a, b = server(0), server(1)
    assert deployment.come(a, 0.0).result(LONG_S) is None
    (place,) = deployment.begin(b)
    assert deployment.come(a).result(LONG_S).round_id == place.round_id


def test_what_the_first_server_says_reaches_all_and_nobody_waits_in_a_round_that_is_over(deployment):
    a, b = deployment.begin(server(0), server(1))
    coordinator = deployment.coordinator
    told = deployment.do(coordinator.told, b.round_id, "meeting")
    coordinator.tell(a.round_id, "meeting", "tcp://there")
    assert told.result(LONG_S) == coordinator.told(a.round_id, "meeting") == "tcp://there"
    of_a, of_b = (deployment.do(coordinator.others, a.round_id, each, [each.upper()]) for each in ("s0", "s1"))
    assert (of_a.result(LONG_S), of_b.result(LONG_S)) == (["S1"], ["S0"])
    waits = [deployment.do(coordinator.told, a.round_id, "dtype")]
    waits.append(deployment.do(coordinator.told, a.round_id, "other"))
    coordinator.end(a.round_id, "a rank has died")
    for each in waits:
        with pytest.raises(RoundOver, match="a rank has died"):
            each.result(LONG_S)
    coordinator.tell(a.round_id, "late", 1)
    with pytest.raises(RoundOver):
        coordinator.others(a.round_id, "s0", [])
    deployment.begin(server(0), server(1))
    assert "late" not in coordinator._notes


@pytest.mark.parametrize(
    ("comer", "named"),
    [
        (server(0, name="s5"), "the server with rank 0: the server with rank 0 runs"),
        (
            server(1, 2, total=3, name="s5"),
            "ranks 1 to 2 can't share experts .* they differ in data_parallel_size",
        ),
        (server(1, name="s5", tp="2"), "they differ in tp. If they are of two deployments"),
    ],
)
def test_a_server_that_does_not_fit_the_others_is_refused(deployment, comer, named):
    waiting = deployment.come(server(0), 0.01)
    assert waiting.result(LONG_S) is None
    with pytest.raises(InvalidConfig, match=named):
        deployment.come(comer).result(LONG_S)


def test_a_server_takes_the_ranks_of_one_that_is_gone(deployment):
    deployment.begin(server(0), server(1))
    deployment.gone.add("s1")
    comes = deployment.come(server(1, name="s5"))
    deployment.begin(server(0))
    assert comes.result(LONG_S).num_before == 1
