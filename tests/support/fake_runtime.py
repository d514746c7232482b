"""Runs ranks without Ray: their actors are objects of the test's process, and answer what the test wants."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
from fake_clock import FakeClock
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from raycore.cluster.given import GivenDevices
from raycore.cluster.rank import Rank
from raycore.cluster.runtime import Connection
from raycore.config import EngineConfig
from raycore.errors import EngineDeadError
from raycore.messages import EngineInfo
from raycore.status import EngineOwner
from raycore.worker.rank import RankIdentity

DRIVER = "driver"
"""The id of the node on which the test's process is."""

PENDING = object()
"""In the place of an answer: there is none until the actor dies."""


class FakeRef(Future[Any]):
    """In the place of an `ObjectRef`."""

    def future(self) -> Future[Any]:
        return self


@dataclass(eq=False)
class FakeActor:
    """In the place of the handle of a `DPEngineCoreActor`. Any method has a `remote`."""

    runtime: FakeRuntime
    name: str
    config: EngineConfig
    identity: RankIdentity
    node: str
    pid: int
    pending: dict[str, FakeRef] = field(default_factory=dict)
    """Calls without an answer, by method."""
    is_dead: bool = False
    is_stopped: bool = False
    """By SIGSTOP."""
    outlives_end: bool = False
    """Whether only SIGKILL ends its process."""

    def __getattr__(self, method: str) -> SimpleNamespace:
        return SimpleNamespace(remote=partial(self.runtime.call, self, method))

    def info(self) -> EngineInfo:
        return EngineInfo(
            dp_rank=self.identity.dp_rank,
            pid=self.pid,
            node_id=self.node,
            num_blocks=8,
            block_size=16,
            max_model_len=64,
            dtype="float32",
            timings_s={},
            worker_pids=[],
        )

    def die(self, error: Exception | None = None) -> None:
        """End the process, or only its `run()` with `error`, as when a step has raised it."""
        if error is None:
            self.is_dead = True
        failed = list(self.pending.values()) if error is None else [self.pending.pop("run")]
        for ref in failed:
            if not ref.done():
                ref.set_exception(error or RayActorError(error_msg=f"process {self.pid} died"))


def in_actor(cause: Exception) -> RayTaskError:
    """An exception that an actor has raised, as Ray raises it in the caller's process."""
    return RayTaskError("run", f"Traceback\n{cause!r}", cause, "ray::run", 99, "10.0.0.1").as_instanceof_cause()


Answer = Callable[..., Any]


class FakeRuntime:
    """In the place of a `RayRuntime`.

    `answers[method]` is called with an actor and a call's arguments, and returns the result, an exception that the call
    raises, or PENDING. For other methods, `usual` has the answer, or it is None.
    """

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.actors: list[FakeActor] = []
        self.calls: list[tuple[str, str, tuple[Any, ...]]] = []
        """(name of the actor, method, arguments) of each call."""
        self.signals: list[tuple[int, int]] = []
        """(pid, signal) of each signal."""
        self.draining: set[str] = set()
        self.owner_has_ended = False
        self.own_node_has_ended = False
        self.worker_ended_with: list[tuple[list[FakeActor], bool]] = []
        """What ran when the test's process would have ended, if it were a worker, and whether Ray was there."""
        self.gpus: list[str] = []
        """Those of the test's process, as if it were an actor."""
        self.group: Any = None
        """The placement group in which the test's process is."""
        self.captures = False
        self.num_connections = 0
        self.seconds_to_explain = 0.0
        self.seconds_to_read_lines = 0.0
        self.answers: dict[str, Answer] = {}
        self.usual: dict[str, Answer] = {
            "choose_dtype": lambda actor: "float32",
            "rendezvous": lambda actor, dtype: f"tcp://{actor.name}",
            "next_rendezvous": lambda actor: f"tcp://{actor.name}",
            "wait_for_init": lambda actor, *_: msgspec.msgpack.encode(actor.info()),
            "run": lambda actor, *_: PENDING,
            "step_age_s": lambda actor: PENDING if actor.is_stopped else 0.0,
            "stop": self._stop,
            "stand_by": lambda actor: [actor.pid],
            "adopt": self._adopt,
            "load_progress": lambda actor: 0.5,
            "regroup": lambda actor, *_: [f"cache of {actor.name}"],
        }
        """The answers of an actor that does well."""
        self._pids = itertools.count(1001)

    # ---- what tests do and see

    def actor(self, name: str) -> FakeActor:
        """The latest actor whose name ends with this."""
        return next(actor for actor in reversed(self.actors) if actor.name.endswith(name))

    @property
    def running(self) -> list[FakeActor]:
        """The actors whose processes haven't ended."""
        return [actor for actor in self.actors if not actor.is_dead]

    def called(self, method: str) -> list[tuple[Any, ...]]:
        """The arguments of each call of a method."""
        return [args for _, called, args in self.calls if called == method]

    def call(self, actor: FakeActor, method: str, *args: Any) -> FakeRef:
        """What `actor.METHOD.remote(...)` does."""
        self.calls.append((actor.name, method, args))
        ref = FakeRef()
        answer = self.answers.get(method) or self.usual.get(method) or (lambda *_: None)
        result = RayActorError(error_msg=f"process {actor.pid} is dead") if actor.is_dead else answer(actor, *args)
        if result is PENDING:
            actor.pending[method] = ref
        elif isinstance(result, Exception):
            ref.set_exception(result)
        else:
            ref.set_result(result)
        return ref

    def _stop(self, actor: FakeActor) -> None:
        actor.pending["run"].set_result(None)

    def _adopt(self, actor: FakeActor, identity: RankIdentity, name: str) -> None:
        actor.identity, actor.name = identity, name

    # ---- `Runtime`

    def connect(self, num_cpus: float) -> Connection:
        self.num_connections += 1
        return Connection(DRIVER, "10.0.0.1:6379", is_ours=False)

    def disconnect(self) -> None:
        self.num_connections -= 1

    def is_connected(self) -> bool:
        return self.num_connections > 0

    def own_gpus(self) -> list[str]:
        return self.gpus

    def own_group(self, *, captures: bool) -> Any:
        return self.group if self.captures or not captures else None

    def create(self, name: str, config: EngineConfig, identity: RankIdentity, bundles: Any, shape: Any) -> Any:
        if isinstance(bundles, GivenDevices):
            identity = msgspec.structs.replace(identity, gpu_ids=bundles.ids)
        return self._create(name, config, identity, bundles.nodes()[shape.engine_bundle_index])

    def create_standby(self, name: str, config: EngineConfig, node_id: str) -> Any:
        return self._create(name, config, RankIdentity(-1, 1), node_id)

    def _create(self, name: str, config: EngineConfig, identity: RankIdentity, node: str) -> FakeActor:
        self.actors.append(FakeActor(self, name, config, identity, node, next(self._pids)))
        return self.actors[-1]

    def wait(
        self, refs: Sequence[Any], num_returns: int = 1, timeout_s: float | None = None
    ) -> tuple[list[Any], list[Any]]:
        self.clock.wait_until(lambda: sum(ref.done() for ref in refs) >= num_returns, timeout_s)
        done = [ref for ref in refs if ref.done()][:num_returns]
        return done, [ref for ref in refs if ref not in done]

    def get(self, ref: Any, timeout_s: float | None = None) -> Any:
        if not self.clock.wait_until(ref.done, timeout_s):
            raise GetTimeoutError(f"no answer within {timeout_s} s")
        return ref.result()

    def end(self, actor: Any) -> None:
        if not actor.outlives_end and not actor.is_stopped:
            actor.die()

    def send_signal(self, pids: Iterable[int], number: int) -> None:
        for actor in self.running:
            if actor.pid in pids:
                self.signals.append((actor.pid, number))
                if number == signal.SIGKILL:
                    actor.die()
                actor.is_stopped = number == signal.SIGSTOP

    def wait_until_gone(self, pids: Iterable[int], timeout_s: float) -> list[int]:
        def running() -> list[int]:
            return [actor.pid for actor in self.running if actor.pid in pids]

        self.clock.wait_until(lambda: not running(), timeout_s)
        return running()

    def watch(self, ranks: Sequence[Rank], own_node: str) -> FakeWatch:
        return FakeWatch(self, ranks)

    def owner(self) -> EngineOwner:
        return EngineOwner("driver", "", 99, DRIVER, "10.0.0.1", "01000000")

    def ended_with_owner(self) -> bool:
        return self.owner_has_ended

    def watch_own_node(self) -> FakeNodeWatch:
        return FakeNodeWatch(self)

    def end_worker(self) -> None:
        self.worker_ended_with.append((self.running, self.is_connected()))

    def draining_nodes(self) -> set[str]:
        return self.draining

    def with_last_lines(self, cause: str, pid: int | None, node_id: str | None) -> str:
        self.clock.let_pass(self.seconds_to_read_lines)
        return cause if pid is None else f"{cause}\nlast lines of {pid}"


class FakeWatch:
    """In the place of an `Ends`."""

    def __init__(self, runtime: FakeRuntime, ranks: Sequence[Rank]) -> None:
        self._runtime = runtime
        self._ranks = [rank for rank in ranks if rank.run_ref is not None]

    def _ended(self) -> list[Rank]:
        return [rank for rank in self._ranks if rank.run_ref.done()]

    def wait(self, timeout_s: float) -> EngineDeadError | None:
        if not self._runtime.clock.wait_until(lambda: bool(self._ended()), timeout_s):
            return None
        rank = self._ended()[0]
        return EngineDeadError(f"dp_rank {rank.dp_rank} ended", pid=rank.info.pid, node=rank.info.node_id)

    def explain(self, error: EngineDeadError) -> EngineDeadError:
        self._runtime.clock.let_pass(self._runtime.seconds_to_explain)
        causes = [rank.run_ref.exception() for rank in self._ended()]
        explained = EngineDeadError(f"{error}: {'; '.join(map(str, causes))}", pid=error.pid, node=error.node)
        explained.__cause__ = causes[0]
        return explained

    def close(self) -> None:
        pass


@dataclass
class FakeNodeWatch:
    """In the place of an `OwnNode`."""

    runtime: FakeRuntime

    def wait(self, timeout_s: float) -> bool:
        return self.runtime.clock.wait_until(lambda: self.runtime.own_node_has_ended, timeout_s)

    def close(self) -> None:
        pass
