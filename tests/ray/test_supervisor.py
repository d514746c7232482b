"""A rank that ends, stalls or has to go is noticed, told of, and replaced; others aren't touched."""

from __future__ import annotations

import os
import queue
import re
import signal
import time
from collections import defaultdict
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest
from fake_ranks import config, live_groups, manager_of
from waiting import LONG_S

from placement.errors import PlacementShortage
from placement.reserve import release
from raycore.cluster.supervisor import Supervisor
from raycore.config import RecoveryConfig
from raycore.engine.rank_events import EngineLost, LossExplained, RanksLost, RankUp
from raycore.errors import EngineDeadError, InvalidConfig
from raycore.node.processes import is_running

pytestmark = pytest.mark.usefixtures("ray_cluster")

RECOVERY = RecoveryConfig(restart_backoff_s=0.05, step_timeout_s=0.5, standby_delay_s=None)


class Listener:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.events: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self.reasons: defaultdict[int, Future[EngineDeadError]] = defaultdict(Future)
        """Of losses, by their numbers."""
        self.busy: set[int] = set()
        """The ranks that have work."""

    def on_rank_event(self, event):
        match event:
            case RankUp():
                self.events.put(("up", event.dp_rank, event.info.pid))
            case RanksLost():
                (dp_rank,) = event.dp_ranks
                self.events.put(("lost", dp_rank, self.reasons[event.loss]))
            case LossExplained():
                self.reasons[event.loss].set_result(event.error)
            case EngineLost():
                self.events.put(("engine lost", event.error))

    def ranks_leaving(self, dp_ranks, timeout_s, come_back=False):
        self.events.put(("leaving", dp_ranks, timeout_s))

    def is_busy(self, dp_rank):
        return dp_rank in self.busy

    def next(self, kind: str, timeout_s: float = LONG_S) -> tuple[Any, ...]:
        event = self.events.get(timeout=timeout_s)
        assert event[0] == kind, event
        if kind == "lost":
            _, dp_rank, reason = event
            return dp_rank, reason.result(LONG_S)
        return event[1:]


class Engine:
    """A manager of fake ranks and their supervisor."""

    def __init__(
        self, behaviour: str = "", recovery: RecoveryConfig = RECOVERY, data_parallel_size: int = 2, **options: Any
    ) -> None:
        engine_config = config(behaviour, data_parallel_size=data_parallel_size, **options)
        engine_config = msgspec.structs.replace(engine_config, recovery=recovery)
        self.manager = manager_of(engine_config)
        self.listener = Listener()
        self.infos = self.manager.start()
        self.supervisor = Supervisor(self.manager, self.listener, engine_config)
        self.supervisor.start()
        for info in self.infos:
            assert self.listener.next("up") == (info.dp_rank, info.pid)

    def stop(self) -> None:
        self.supervisor.stop()
        self.manager.shutdown()
        self.supervisor.join(5.0)


@pytest.fixture
def start():
    engines: list[Engine] = []

    def start(*arguments: Any, **options: Any) -> Engine:
        engines.append(Engine(*arguments, **options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.stop()
        assert engine.listener.events.empty(), "ranks that were asked to stop aren't lost"
        assert not [rank for rank in engine.infos if is_running(rank.pid)]
    assert live_groups() == []


def test_a_killed_rank_is_reported_lost_at_once_and_replaced(start):
    engine = start()
    victim = engine.infos[1]
    os.kill(victim.pid, signal.SIGKILL)
    rank, error = engine.listener.next("lost")
    assert rank == 1
    # Ray's reason, unless Ray takes too long to give one
    reasons = rf"(SYSTEM_ERROR|its process {victim.pid} ended)"
    assert re.match(rf"dp_rank 1 \(pid {victim.pid}, node {victim.node_id[:8]}\) died: {reasons}", str(error))
    assert str(error).endswith(f"\nThe last lines of process {victim.pid}:\n    dp_rank 1 is ready")
    rank, pid = engine.listener.next("up")
    assert rank == 1
    assert pid != victim.pid
    assert is_running(engine.infos[0].pid), "the other rank has nothing to do with it"


def test_all_ranks_compute_in_the_dtype_that_the_first_one_chose(start):
    engine = start(dtype="auto")
    assert [info.dtype for info in engine.infos] == ["bfloat16", "bfloat16"]
    os.kill(engine.infos[0].pid, signal.SIGKILL)
    assert engine.listener.next("lost")[0] == 0
    engine.listener.next("up")
    assert [info.dtype for info in engine.manager.infos] == ["bfloat16", "bfloat16"]


@pytest.mark.parametrize(
    ("behaviour", "begins"),
    [("worker dies", "worker 0 (pid 4711, node n1) died: out of memory\n"), ("returns", "dp_rank 1 (pid ")],
)
def test_a_rank_whose_run_call_returns_unasked_is_lost_and_replaced(start, behaviour, begins):
    engine = start(behaviour)
    rank, error = engine.listener.next("lost")
    assert rank == 1
    assert str(error).startswith(begins)
    assert engine.listener.next("up")[0] == 1


def test_a_busy_rank_that_is_stuck_is_killed_and_replaced(start):
    engine = start("stuck", msgspec.structs.replace(RECOVERY, step_timeout_s=20.0))
    time.sleep(1.0)
    assert engine.listener.events.empty(), "an idle rank isn't asked"
    engine.listener.busy.add(1)
    rank, error = engine.listener.next("lost")
    assert (rank, "its present step has taken 1000.0 s" in str(error)) == (1, True)
    assert str(error).endswith(f"\nThe last lines of process {engine.infos[1].pid}:\n    dp_rank 1 is ready")
    assert engine.listener.next("up")[0] == 1


def test_a_stopped_process_is_killed_and_replaced(start):
    engine = start()
    engine.listener.busy.add(0)
    os.kill(engine.infos[0].pid, signal.SIGSTOP)
    rank, error = engine.listener.next("lost")
    assert rank == 0
    assert "hasn't answered for" in str(error)
    assert engine.listener.next("up")[0] == 0


def test_a_rank_reported_by_a_client_is_ended_and_replaced(start):
    engine = start()
    engine.supervisor.report(1, "its stream broke")
    rank, error = engine.listener.next("lost")
    assert (rank, "its stream broke" in str(error)) == (1, True)
    assert engine.listener.next("up")[0] == 1


def test_a_rank_that_fails_all_restarts_is_given_up_and_the_others_serve_on(start):
    engine = start("does not come back", msgspec.structs.replace(RECOVERY, max_rank_restarts=2))
    os.kill(engine.infos[1].pid, signal.SIGKILL)
    assert engine.listener.next("lost")[0] == 1
    assert engine.supervisor.wait(3.0) is None
    assert not engine.supervisor.has_ended
    os.kill(engine.infos[0].pid, signal.SIGKILL)
    assert engine.listener.next("lost")[0] == 0
    (error,) = engine.listener.next("engine lost")
    assert isinstance(error, EngineDeadError)
    assert str(error).startswith("the disk is gone\n")
    assert engine.supervisor.wait(1.0) is error


def test_a_lost_rank_waits_for_a_node_with_room_while_the_others_serve_on(start, monkeypatch):
    engine = start()
    monkeypatch.setattr("raycore.cluster.reservations.answers", lambda node: False)
    rank = engine.manager.ranks[1]
    bundles, rank.bundles = rank.bundles, None
    engine.manager.reservations.crashed_nodes.add(engine.manager.node)  # the only one
    release([bundles.group])
    assert engine.listener.next("lost")[0] == 1
    time.sleep(1.0)
    assert engine.listener.events.empty()
    watch = engine.supervisor.watches()[1]
    assert (watch.num_restarts, watch.has_given_up, "no live node" in watch.shortage) == (0, False, True)
    assert is_running(engine.infos[0].pid)
    monkeypatch.setattr("raycore.cluster.reservations.answers", lambda node: True)
    assert engine.listener.next("up")[0] == 1


def test_scale_adds_and_removes_ranks(start):
    engine = start(data_parallel_size=1)
    infos = engine.supervisor.scale(3, drain_timeout_s=7.0)
    assert [info.dp_rank for info in infos] == [0, 1, 2]
    assert {engine.listener.next("up")[0] for _ in range(2)} == {1, 2}
    os.kill(infos[2].pid, signal.SIGKILL)
    assert engine.listener.next("lost")[0] == 2
    assert engine.listener.next("up")[0] == 2
    assert [info.dp_rank for info in engine.supervisor.scale(1, drain_timeout_s=7.0)] == [0]
    assert engine.listener.next("leaving") == ([1, 2], 7.0)
    assert len(live_groups()) == 1
    assert not is_running(infos[1].pid)


def test_scale_refuses_impossible_numbers_of_ranks_and_changes_none(start):
    engine = start()
    with pytest.raises(InvalidConfig, match="data_parallel_size=0"):
        engine.supervisor.scale(0, 1.0)
    with pytest.raises(PlacementShortage, match="98 ranks"):
        engine.supervisor.scale(100, 1.0)
    assert sorted(engine.manager.ranks) == [0, 1]
    assert len(live_groups()) == 2
