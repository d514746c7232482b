"""An engine's groups go when the process, the actor or the task that created it ends."""

from __future__ import annotations

import logging
import os
import queue
import subprocess
from types import SimpleNamespace
from typing import Any
from weakref import finalize

import pytest
from waiting import LONG_S

from placement.topology import ClusterView, NodeView
from raycore.cluster import owner
from raycore.cluster.owner import Reaper, end_with_owner, start_reaper


class Owner:
    """What the reaper sees of the process that it watches, and what it does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.groups = ["raycore_ab_dp0"]
        self.state: str | None = "ALIVE"
        self.nodes = {"here": True}
        self.worker_is_alive = True
        """Whether Ray knows the owner's process, `ab`, to run."""
        self.looks = 0
        self.on_look: dict[int, Any] = {}
        """What happens at the start of the n-th pause."""
        self.removed: list[list[str]] = []
        self.has_ended = False
        self.process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        monkeypatch.setattr(owner, "threading", SimpleNamespace(Thread=lambda **_: SimpleNamespace(start=lambda: None)))
        monkeypatch.setattr(owner, "time", SimpleNamespace(sleep=self._pause))
        monkeypatch.setattr(owner, "title_process", lambda name: None)
        monkeypatch.setattr(owner, "end_with_raylet", lambda: None)
        monkeypatch.setattr(owner, "node_id", lambda: "here")
        monkeypatch.setattr(owner, "own_actor", lambda: self)
        monkeypatch.setattr(owner, "kill", lambda actor: setattr(actor, "has_ended", True))
        monkeypatch.setattr(owner, "groups_named", lambda prefix: [g for g in self.groups if g.startswith(prefix)])
        monkeypatch.setattr(owner, "release", self._release)
        monkeypatch.setattr(owner, "_actor_state", lambda actor_id: self.state)
        monkeypatch.setattr(owner, "read_cluster", self._read_cluster)
        monkeypatch.setattr(owner, "is_worker_alive", lambda worker_id: worker_id == "ab" and self.worker_is_alive)

    def watch(self, node: str = "here", actor_id: str | None = "12ab") -> None:
        """Have a reaper watch until it ends."""
        Reaper("reaper", node, self.process.pid, "ab", actor_id, "raycore_ab_dp")._run()

    def die(self) -> None:
        self.process.kill()
        self.process.wait(LONG_S)

    def _pause(self, seconds: float) -> None:
        self.looks += 1
        self.on_look.pop(self.looks, lambda: None)()
        assert self.looks < 100

    def _release(self, groups: list[str]) -> None:
        self.removed.append(groups)
        self.groups = [group for group in self.groups if group not in groups]

    def _read_cluster(self) -> ClusterView:
        return ClusterView(tuple(NodeView(name, name, {}, {}, alive=alive) for name, alive in self.nodes.items()))


@pytest.fixture
def watched(monkeypatch):
    watched = Owner(monkeypatch)
    yield watched
    watched.die()


def test_groups_are_removed_when_the_owners_process_has_ended(watched):
    watched.on_look[3] = watched.die
    watched.watch()
    assert watched.looks >= 3
    assert watched.groups == []
    assert watched.has_ended


def test_groups_are_removed_when_the_owner_actor_is_dead_and_again_after_its_process(watched):
    watched.on_look[3] = lambda: setattr(watched, "state", "DEAD")
    watched.on_look[6] = lambda: (watched.groups.append("raycore_ab_dp1"), watched.die())
    watched.watch()
    assert watched.removed[0] == ["raycore_ab_dp0"], "before the process has ended"
    assert watched.groups == []
    assert watched.has_ended


def test_the_reaper_keeps_groups_of_other_engines(watched):
    watched.groups.append("raycore_cd_dp0")
    watched.die()
    watched.watch()
    assert watched.groups == ["raycore_cd_dp0"]


def test_an_owner_actor_that_rays_tables_lack_is_not_taken_for_dead(watched):
    watched.state = None
    watched.on_look[5] = watched.die
    watched.watch()
    assert watched.looks >= 5


def test_an_owners_process_on_another_node_counts_as_ended_with_its_node(watched):
    watched.nodes["there"] = True
    watched.on_look[3] = lambda: watched.nodes.update(there=False)
    watched.watch("there", None)
    assert watched.looks >= 3
    assert watched.groups == []


@pytest.mark.parametrize("actor_id", ["12ab", None])
def test_a_reaper_on_another_node_watches_the_owners_process(watched, actor_id):
    """Not the actor, which Ray may restart in another process, and not only the node."""
    watched.nodes["there"] = True
    watched.on_look[3] = lambda: setattr(watched, "worker_is_alive", False)
    watched.watch("there", actor_id)
    assert watched.looks >= 3
    assert watched.groups == []
    assert watched.has_ended


def test_a_reaper_on_another_node_ends_after_the_owner_actor_and_its_process(watched):
    watched.nodes["there"] = True
    watched.on_look[3] = lambda: setattr(watched, "state", "DEAD")
    watched.on_look[6] = lambda: setattr(watched, "worker_is_alive", False)
    watched.watch("there")
    assert watched.looks >= 6
    assert watched.has_ended


def test_a_reaper_that_fails_ends_so_that_ray_starts_another(watched, monkeypatch):
    class Ended(BaseException): ...

    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(owner, "os", SimpleNamespace(_exit=end))
    monkeypatch.setattr(owner, "groups_named", lambda prefix: 1 / 0)
    watched.die()
    with pytest.raises(Ended, match="1"):
        watched.watch()


def test_a_driver_starts_no_reaper_and_no_owner_watch(monkeypatch):
    monkeypatch.setattr(owner, "is_worker", lambda: False)
    end: Any = object()
    assert start_reaper("reaper", "raycore_ab_dp") is None
    end_with_owner(end)


@pytest.mark.parametrize(
    ("actor_id", "state", "has_ended"), [("12ab", "DEAD", True), ("12ab", "ALIVE", False), (None, "DEAD", False)]
)
def test_an_actors_engines_end_once_the_actor_has_ended_for_ray(monkeypatch, actor_id, state, has_ended):
    ended = queue.SimpleQueue[str]()
    monkeypatch.setattr(owner, "is_worker", lambda: True)
    monkeypatch.setattr(owner, "own_actor_id", lambda: actor_id)
    monkeypatch.setattr(owner, "_actor_state", lambda actor_id: state)
    monkeypatch.setattr(owner, "end_engines", lambda: ended.put("engines"))
    assert owner.ended_with_owner() is has_ended
    assert [ended.get(timeout=LONG_S) for _ in range(has_ended)] == ["engines"] * has_ended
    assert ended.empty()


def test_a_reaper_outlives_its_creator_and_prefers_its_node(monkeypatch):
    chosen: dict[str, Any] = {}

    class ActorClass:
        def options(self, **options: Any) -> ActorClass:
            chosen.update(options)
            return self

        def remote(self, *arguments: Any) -> tuple[Any, ...]:
            return arguments

    monkeypatch.setattr(owner, "REAPER", ActorClass())
    monkeypatch.setattr(owner, "is_worker", lambda: True)
    node = "12" * 28
    monkeypatch.setattr(owner, "node_id", lambda: node)
    monkeypatch.setattr(owner, "own_actor_id", lambda: "12ab")
    monkeypatch.setattr(owner, "own_worker_id", lambda: "ab")
    assert start_reaper("reaper", "raycore_ab_dp") == ("reaper", node, os.getpid(), "ab", "12ab", "raycore_ab_dp")
    assert chosen["lifetime"] == "detached"
    assert (chosen["scheduling_strategy"].node_id, chosen["scheduling_strategy"].soft) == (node, True)


class Ended:
    """An engine that notes its end."""

    def __init__(self) -> None:
        self.times: list[bool] = []
        self.end = finalize(self, self.times.append, True)


def test_an_engine_ends_when_its_actors_constructor_has_failed(monkeypatch):
    monkeypatch.setattr(owner, "is_worker", lambda: True)
    monkeypatch.setattr(owner, "own_actor_id", lambda: "12ab")
    log, engine = logging.getLogger("ray._raylet"), Ended()
    before = list(log.handlers)
    try:
        end_with_owner(engine.end)
        log.error("Exception raised in another task")
        assert engine.times == []
        log.error("Exception raised in creation task: ray::Actor.__init__()")
        assert engine.times == [True]
    finally:
        log.handlers = before


def test_an_engine_created_in_a_task_ends_after_that_task(monkeypatch):
    tasks = iter(["task", "task", "task", None])
    engine, pauses = Ended(), list[float]()
    monkeypatch.setattr(owner, "_running_task_id", lambda: next(tasks))
    monkeypatch.setattr(owner, "time", SimpleNamespace(sleep=pauses.append))
    owner._wait_for_task("task", engine.end)
    assert (len(pauses), engine.times) == (3, [True])
