"""What a supervisor makes of ranks whose processes really end or stop: it learns that from Ray, and from the system.

What it decides then is tested without Ray, in `tests/unit/cluster` and `tests/simulation`.
"""

from __future__ import annotations

import os
import queue
import re
import signal
from collections import defaultdict
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest
from fake_ranks import config, live_groups, manager_of
from waiting import LONG_S

from raycore.cluster.supervisor import Supervisor
from raycore.config import RecoveryConfig
from raycore.engine.rank_events import LossExplained, RanksLost, RankUp
from raycore.errors import EngineDeadError
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

    def is_busy(self, dp_rank):
        return dp_rank in self.busy

    def next(self, kind: str) -> tuple[Any, ...]:
        event = self.events.get(timeout=LONG_S)
        assert event[0] == kind, event
        if kind == "lost":
            _, dp_rank, reason = event
            return dp_rank, reason.result(LONG_S)
        return event[1:]


class Engine:
    """A manager of fake ranks and their supervisor."""

    def __init__(self, behaviour: str = "") -> None:
        engine_config = msgspec.structs.replace(config(behaviour, data_parallel_size=2), recovery=RECOVERY)
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

    def start(behaviour: str = "") -> Engine:
        engines.append(Engine(behaviour))
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


def test_a_stopped_process_is_killed_and_replaced(start):
    engine = start()
    engine.listener.busy.add(0)
    os.kill(engine.infos[0].pid, signal.SIGSTOP)
    rank, error = engine.listener.next("lost")
    assert rank == 0
    assert "hasn't answered for" in str(error)
    assert engine.listener.next("up")[0] == 0


def test_a_rank_whose_worker_has_died_is_lost_with_the_workers_death(start):
    """The error passes through Ray."""
    engine = start("worker dies")
    rank, error = engine.listener.next("lost")
    assert rank == 1
    assert str(error).startswith("worker 0 (pid 4711, node n1) died: out of memory\n")
    assert engine.listener.next("up")[0] == 1
