"""Engines without Ray: the real supervisor, manager and reservations, with fake ranks on fake nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from configs import make_config
from fake_groups import FakeGroups
from fake_runtime import DRIVER, FakeActor, FakeRuntime

from raycore.cluster.manager import CoreEngineActorManager
from raycore.cluster.supervisor import Supervisor
from raycore.config import EngineConfig, ExecutorConfig, ParallelConfig, RecoveryConfig
from raycore.engine.rank_events import EngineLost, LossExplained, RankEvent, RanksLost, RankUp
from raycore.parts.experts.cluster import GroupScaling
from raycore.parts.transfers.config.kv_transfer import KVTransferConfig


def engine_config(
    num_ranks: int = 2,
    recovery: dict[str, Any] | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    kv_transfer: KVTransferConfig | None = None,
    **parallel: Any,
) -> EngineConfig:
    return msgspec.structs.replace(
        make_config(dtype=dtype),
        parallel=ParallelConfig(1, num_ranks, **parallel),
        recovery=RecoveryConfig(**{"standby_delay_s": None, **(recovery or {})}),
        executor=ExecutorConfig("inline", init_timeout_s=100.0, shutdown_timeout_s=5.0),
        device=device,
        kv_transfer_config=kv_transfer,
    )


class FakeListener:
    """Writes down what it is told, and when."""

    def __init__(self, runtime: FakeRuntime) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.times_s: list[float] = []
        self.errors: list[str] = []
        """The causes of losses that were explained."""
        self.busy: set[int] = set()
        self.while_leaving: Callable[[], object] = lambda: None
        """What happens while ranks that leave finish their requests."""
        self._runtime = runtime

    def on_rank_event(self, event: RankEvent) -> None:
        match event:
            case RankUp():
                self._note("up", event.dp_rank, event.info.pid)
            case RanksLost():
                self._note("lost", list(event.dp_ranks), event.loss)
            case LossExplained():
                self.errors.append(str(event.error))
                self._note("explained", event.loss)
            case EngineLost():
                self.errors.append(str(event.error))
                self._note("engine lost")

    def ranks_leaving(self, dp_ranks: Sequence[int], timeout_s: float, come_back: bool = False) -> None:
        self._note("leaving for now" if come_back else "leaving", list(dp_ranks), timeout_s)
        self.while_leaving()

    def is_busy(self, dp_rank: int) -> bool:
        return dp_rank in self.busy

    def _note(self, *event: Any) -> None:
        self.events.append(event)
        self.times_s.append(self._runtime.clock.now_s())

    def take(self) -> list[tuple[Any, ...]]:
        """The events since the last call."""
        events, self.events, self.times_s = self.events, [], []
        return events


class Engine:
    """A supervisor, its manager, and what they deal with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, config: EngineConfig, nodes: dict[str, int], **options: Any):
        self.runtime = FakeRuntime()
        self.clock = self.runtime.clock
        self.groups = FakeGroups(self.clock, nodes)
        self.groups.install(monkeypatch)
        self.manager = CoreEngineActorManager(config, runtime=self.runtime, **options)
        self.listener = FakeListener(self.runtime)
        self.supervisor = Supervisor(self.manager, self.listener, config)
        self.group = GroupScaling(self.manager, config)

    def start(self) -> Engine:
        self.manager.start()
        self.supervisor.start()
        self.clock.let_pass(0.0)
        return self

    def stop(self) -> None:
        self.supervisor.stop()
        self.manager.shutdown()
        self.supervisor.join(5.0)
        self.clock.let_pass(0.0)

    def actor(self, dp_rank: int) -> FakeActor:
        """The actor of a rank that is up or starting."""
        actor: Any = self.manager.ranks[dp_rank].actor
        return actor

    def pids(self) -> dict[int, int]:
        return {info.dp_rank: info.pid for info in self.manager.infos}


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch):
    """Make an engine that hasn't started."""

    def make(num_ranks: int = 2, nodes: dict[str, int] | None = None, **options: Any) -> Engine:
        config = engine_config(num_ranks, **options)
        engines.append(Engine(monkeypatch, config, nodes or {DRIVER: 8}))
        return engines[-1]

    engines: list[Engine] = []
    yield make
    for engine in engines:
        engine.stop()
        assert engine.runtime.running == []
        assert engine.groups.standing == []
        assert engine.runtime.num_connections == 0


@pytest.fixture
def start(make: Callable[..., Engine]):
    """Start an engine."""
    return lambda *args, **options: make(*args, **options).start()
