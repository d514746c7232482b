"""A server's part in rounds: its ranks' configuration, what it tells the others, and what it hears of their end."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from configs import make_config
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from waiting import LONG_S, eventually

from raycore.cluster.clock import Clock
from raycore.config import EngineConfig, ParallelConfig
from raycore.errors import InitializationError, InvalidConfig, InvalidInput
from raycore.parts.servers.cluster import servers as module
from raycore.parts.servers.cluster.coordinator import Coordinator
from raycore.parts.servers.cluster.servers import Servers, SharingServers, servers_of
from raycore.parts.servers.values import RoundOver


class Actor:
    """In the place of the handle of a coordinator's actor: calls run on threads, and get the values of refs."""

    def __init__(self, plain: Coordinator, pool: ThreadPoolExecutor) -> None:
        self.is_dead = False
        self._plain, self._pool = plain, pool

    def __getattr__(self, method: str) -> SimpleNamespace:
        def remote(*args: Any) -> Future[Any]:
            if self.is_dead:
                failed: Future[Any] = Future()
                failed.set_exception(RayActorError())
                return failed
            return self._pool.submit(call, *args)

        def call(*args: Any) -> Any:
            values = [each.result() if isinstance(each, Future) else each for each in args]
            try:
                return getattr(self._plain, method)(*values)
            except Exception as error:
                if self.is_dead:
                    raise RayActorError from None
                raise RayTaskError(method, "", error).as_instanceof_cause() from None

        return SimpleNamespace(remote=remote)

    def die(self) -> None:
        """Fail all calls, those that wait, too."""
        self.is_dead = True
        with self._plain._changed:
            self._plain._end("it is dead")


class Runtime:
    """As much of a runtime as servers need."""

    def __init__(self) -> None:
        self.clock = Clock()

    def get(self, ref: Future[Any], timeout_s: float) -> Any:
        try:
            return ref.result(timeout_s)
        except TimeoutError:
            raise GetTimeoutError from None

    def wait(self, refs: list[Future[Any]], timeout_s: float) -> Any:
        return wait(refs, timeout_s)


class Deployment:
    """Servers with one rank each."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(40)
        self.found = Actor(self._coordinator(), self.pool)
        self.servers: list[SharingServers] = []

    @staticmethod
    def _coordinator() -> Coordinator:
        return Coordinator("test", lambda server: True)

    def make(self, rank: int, total: int = 2, init_timeout_s: float = LONG_S) -> tuple[SharingServers, EngineConfig]:
        config = make_config()
        places = {"data_parallel_rank": rank, "first_rank": rank, "num_ranks_of_servers": total}
        config = msgspec.structs.replace(
            config,
            parallel=ParallelConfig(enable_expert_parallel=True, num_ranks_before=rank, **places),
            executor=msgspec.structs.replace(config.executor, init_timeout_s=init_timeout_s),
        )
        runtime: Any = Runtime()
        self.servers.append(SharingServers(config, runtime, self._find))
        return self.servers[-1], config

    def _find(self, name: str) -> Any:
        return self.found

    def gather(self, *made: tuple[SharingServers, EngineConfig]) -> list[EngineConfig]:
        """All of them begin a round."""
        gathered = [self.pool.submit(server.gather, config, lambda: True) for server, config in made]
        return [each.result(LONG_S) for each in gathered]

    def lose_coordinator(self) -> None:
        self.found.die()
        self.found = Actor(self._coordinator(), self.pool)

    def close(self) -> None:
        for server in self.servers:
            server.close()
        self.pool.shutdown()


@pytest.fixture
def deployment(monkeypatch):
    monkeypatch.setattr(module, "own_worker_id", lambda: "worker")
    monkeypatch.setattr(module, "node_id", lambda: "node")
    monkeypatch.setattr(module, "_POLL_S", 0.05)
    made = Deployment()
    yield made
    made.close()


def actors(*names: str) -> list[Any]:
    return [SimpleNamespace(actor=name) for name in names]


def test_an_engine_that_shares_with_no_other_server_waits_for_none_and_tells_nothing():
    runtime: Any = None
    servers, config = servers_of(make_config(), runtime), make_config()
    assert type(servers) is Servers
    assert servers.gather(config, lambda: True) is config
    assert servers.shared("dtype", lambda: "float32") == "float32"
    arguments, until_up = servers.others([])
    assert arguments == []
    until_up(0.0, lambda: True)
    servers.check()
    servers.check_alone()
    assert not servers.begins_anew("no memory")


def test_ranks_of_several_servers_have_their_places_among_all(deployment):
    made = [deployment.make(0), deployment.make(1)]
    parallel = [config.parallel for config in deployment.gather(*made)]
    assert [(each.num_sharing, each.num_ranks_before, each.is_lockstep) for each in parallel] == [
        (2, 0, True),
        (2, 1, True),
    ]
    (first, _), (second, _) = made
    address: Future[str] = Future()
    of_first = first.shared("meeting", lambda: address)
    of_second: Any = second.shared("meeting", lambda: pytest.fail("the first one decides"))
    address.set_result("tcp://there")
    assert of_first is address
    assert of_second.result(LONG_S) == "tcp://there"
    (of_first,), until_up = first.others(actors("a"))
    waiting = deployment.pool.submit(until_up, math.inf, lambda: True)
    with pytest.raises(InitializationError, match=r"weren't up within init_timeout_s="):
        until_up(0.0, lambda: True)
    assert not waiting.done(), "the first server serves, and the second one's rank has no loop"
    (of_second,), _ = second.others(actors("b"))
    waiting.result(LONG_S)
    assert (of_first.result(LONG_S), of_second.result(LONG_S)) == (["b"], ["a"])


@pytest.mark.parametrize("how", ["the other one ends", "the coordinator does", "the server is shut down"])
def test_a_server_that_waits_for_ranks_that_will_not_be_up_begins_anew(deployment, how):
    made = [deployment.make(0), deployment.make(1)]
    deployment.gather(*made)
    (first, _), (second, _) = made
    _, until_up = first.others(actors("a"))
    waiting = deployment.pool.submit(until_up, math.inf, lambda: how != "the server is shut down")
    if how == "the other one ends":
        second.close()
    elif how == "the coordinator does":
        deployment.lose_coordinator()
    with pytest.raises(InitializationError if how == "the server is shut down" else RoundOver):
        waiting.result(LONG_S)


@pytest.mark.parametrize("how", ["close", "end_round", "coordinator"])
def test_the_end_of_a_round_is_told_until_the_next_one_begins(deployment, how):
    one, two = deployment.make(0), deployment.make(1)
    deployment.gather(one, two)
    told: list[str] = []
    one[0].on_over(told.append)
    one[0].check()
    if how == "close":
        two[0].close()
    elif how == "end_round":
        two[0].end_round("a rank has died")
    else:
        deployment.lose_coordinator()
    eventually(lambda: len(told) > 1)
    with pytest.raises(RoundOver):
        one[0].check()
    if how == "close":
        (config,) = deployment.gather(one)
        assert (config.parallel.num_sharing, config.parallel.is_lockstep) == (1, False)
    else:
        deployment.gather(one, two)
    one[0].check()


def test_only_the_server_whose_ranks_failed_first_does_not_begin_anew(deployment):
    one, two = deployment.make(0), deployment.make(1)
    deployment.gather(one, two)
    assert not one[0].begins_anew("no memory")
    assert two[0].begins_anew("another worker has failed")
    with pytest.raises(RoundOver, match="no memory"):
        eventually(two[0].check)
    one[0].close()
    deployment.gather(two)
    deployment.lose_coordinator()
    eventually(lambda: two[0].begins_anew("anything"))


@pytest.mark.parametrize("cancel", [lambda server: server.close(), None])
def test_a_server_whose_others_do_not_come_does_not_wait_for_ever(deployment, cancel: Callable[[Any], Any] | None):
    server, config = deployment.make(0, init_timeout_s=LONG_S if cancel else 0.1)
    gathered = deployment.pool.submit(server.gather, config, lambda: True)
    if cancel is not None:
        cancel(server)
    with pytest.raises(InitializationError, match="shut down" if cancel else "haven't come within init_timeout_s=0.1"):
        gathered.result(LONG_S)


def test_a_server_that_does_not_fit_says_so_and_none_changes_its_activity_alone(deployment):
    one, other = deployment.make(0, total=3), deployment.make(0, total=3)
    waiting = deployment.pool.submit(one[0].gather, one[1], lambda: True)
    eventually(lambda: deployment.found._plain._servers)
    with pytest.raises(InvalidConfig, match=r"runs\. If they are of two deployments"):
        other[0].gather(other[1], lambda: True)
    with pytest.raises(InvalidInput, match="one server alone can't pause"):
        one[0].check_alone()
    one[0].close()
    with pytest.raises(InitializationError):
        waiting.result(LONG_S)
