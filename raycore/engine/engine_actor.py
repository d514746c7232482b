"""The Ray actor that hosts one data-parallel rank's engine. Holds no policy.

Four concurrency groups keep its callers apart: `run` executes the engine's loop, `io` receives requests (on one thread,
so that an abort never overtakes its submit), `outputs` streams results, and `utility` waits for the loop's replies. The
default group stays free for the calls of Ray's channels.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from typing import Any

import msgspec
from ray.util.placement_group import PlacementGroup

from raycore.config import EngineConfig
from raycore.engine.core import EngineCore, decode_requests, run_loop
from raycore.engine.lockstep import run_lockstep_loop
from raycore.engine.mailbox import Abort, ForgetClient, Mailbox, StartWave, Submit, Utility
from raycore.engine.waves import Waves
from raycore.executor.base import Executor
from raycore.logs import log_as
from raycore.messages import EngineInfo
from raycore.node import lifeline
from raycore.node.garbage import freeze_heap
from raycore.ray_api import actor_class, endpoint, node_id, node_ip
from raycore.worker.rank import RankIdentity

logger = logging.getLogger(__name__)

MAX_CLIENTS = 16
"""Limit on simultaneous output streams. Each client's stream occupies a thread of the actor."""


class DPEngineCoreActor:
    """One rank: an `EngineCore`, its mailbox, and the loop between them."""

    def __init__(
        self,
        config_bytes: bytes,
        identity: RankIdentity,
        placement_group: PlacementGroup | None,
        name: str,
    ) -> None:
        self._config = EngineConfig.decode(config_bytes)
        self._identity = identity
        self._name = name
        self._group = placement_group
        log_as(_label(identity), self._config.log_level)
        self._mailbox = Mailbox()
        self._executor: Executor | None = None
        self._core: EngineCore | None = None
        lifeline.hold()

    def __repr__(self) -> str:
        return self._name

    @endpoint("run")
    def stand_by(self) -> list[int]:
        """Start the processes of a standby, which isn't any rank yet. Returns their process ids."""
        self._executor = self._make_executor()
        self._executor.stand_by()
        return sorted({os.getpid(), *self._executor.worker_pids()})

    @endpoint("run")
    def adopt(self, identity: RankIdentity, name: str) -> None:
        """Turn a standby into this rank. Call it after `stand_by()` and before `wait_for_init()`."""
        assert self._executor is not None, "stand_by() comes first"
        self._identity, self._name = identity, name
        log_as(_label(identity), self._config.log_level)
        self._executor.adopt(identity)

    @endpoint("run")
    def rendezvous(self) -> str:
        """Where the workers of all ranks that share experts meet. Call it on one rank, before `wait_for_init()`."""
        self._executor = self._make_executor()
        return self._executor.rendezvous()

    @endpoint("run")
    def wait_for_init(self, rendezvous: str | None = None) -> bytes:
        """Initialise the rank. Returns an encoded `EngineInfo`; raises if the rank can't be initialised.

        `rendezvous`: the result of one rank's `rendezvous()` if ranks share experts. They are initialised together.
        """
        started_s = time.perf_counter()
        executor = self._executor = self._executor or self._make_executor()
        self._core = EngineCore(self._config, executor, rendezvous)
        executor.register_failure_callback(self._mailbox.fail)
        self._core.timings_s["engine"] = round(time.perf_counter() - started_s, 3)
        info = EngineInfo(
            dp_rank=self._identity.dp_rank,
            pid=os.getpid(),
            node_id=node_id(),
            num_blocks=self._core.num_blocks,
            block_size=self._config.cache.block_size,
            max_model_len=self._config.model.max_model_len,
            dtype=executor.dtype_name(),
            timings_s=self._core.timings_s,
            worker_pids=executor.worker_pids(),
            gpu_ids=executor.collective_rpc("gpu_id") if self._config.device == "cuda" else [],
        )
        executor.collective_rpc(freeze_heap)
        freeze_heap()
        return msgspec.msgpack.encode(info)

    @endpoint()
    def load_progress(self) -> float:
        """Share of the weights that has been loaded, 0 to 1. May be called while `wait_for_init()` runs."""
        return self._executor.load_progress() if self._executor is not None else 0.0

    @endpoint("run")
    def run(self, peers: list[DPEngineCoreActor]) -> None:
        """Run the engine's loop. Stops the workers and returns after `stop()`.

        `peers`: the other ranks if ranks share experts, else empty.

        If the rank can't continue, this raises at once and leaves the workers running: the supervisor kills them.
        """
        assert self._core is not None, "wait_for_init() comes first"
        try:
            if self._config.parallel.is_lockstep:
                self._run_in_lockstep(self._core, peers)
            else:
                run_loop(self._core, self._mailbox)
        finally:
            self._mailbox.close()
        self._core.shutdown()

    @endpoint("io")
    def start_wave(self, wave: int) -> None:
        """Take part in a wave that a peer has started."""
        self._mailbox.put(StartWave(wave))

    @endpoint("io")
    def step_age_s(self) -> float:
        """Seconds since the current step began; 0 between steps. Polled by the watchdog."""
        return self._core.step_age_s() if self._core is not None else 0.0

    @endpoint("io")
    def submit(self, requests: bytes) -> None:
        """Add requests: an encoded list of `EngineRequest`. A request that can't be decoded fails alone."""
        try:
            self._mailbox.put(Submit(*decode_requests(requests)))
        except Exception as error:
            # No caller reads this result, and the requests in the message are unknown, so they can't be refused. Fail
            # the rank instead: its loss moves them to other ranks.
            self._mailbox.fail(error)
            raise

    @endpoint("io")
    def abort(self, seq_ids: list[int]) -> None:
        """Abort requests."""
        self._mailbox.put(Abort(seq_ids))

    @endpoint("io")
    def forget_client(self, client: int) -> None:
        """Abort the requests of a client whose process has ended, and end its output stream."""
        self._mailbox.put(ForgetClient(client))

    @endpoint("outputs")
    def outputs(self, client: int) -> Iterator[bytes]:
        """Stream one client's encoded `OutputBatch`es. Ends with the rank, or when the client is forgotten."""
        yield from self._mailbox.outputs(client)

    @endpoint("utility")
    def utility(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float) -> Any:
        """Call one of the engine's utilities between two steps. Waits at most `timeout_s` for the result."""
        command = Utility(method, args, kwargs)
        self._mailbox.put(command)
        return command.reply.result(timeout_s)

    @endpoint("io")
    def stop(self) -> None:
        """Have `run()` return after the current step."""
        self._mailbox.stop()

    def _run_in_lockstep(self, core: EngineCore, peers: list[DPEngineCoreActor]) -> None:
        def tell_peers(wave: int) -> None:
            for peer in peers:
                peer.start_wave.remote(wave)

        waves = Waves(self._config.parallel.dp_sync_interval)
        run_lockstep_loop(core, self._mailbox, waves, tell_peers)

    def _make_executor(self) -> Executor:
        if self._config.executor.backend == "inline":
            from raycore.executor.inline import InlineExecutor

            return InlineExecutor(self._config, self._identity, node_ip())
        from raycore.executor.ray_executor import RayExecutor

        return RayExecutor(self._config, self._identity, self._group)


DP_ENGINE_CORE_ACTOR = actor_class(
    DPEngineCoreActor, concurrency_groups={"run": 1, "io": 1, "outputs": MAX_CLIENTS, "utility": 4}
)
"""The Ray actor class."""


def _label(identity: RankIdentity) -> str:
    """The rank's name in log lines."""
    return f"dp{identity.dp_rank}" if identity.dp_rank >= 0 else "standby"
