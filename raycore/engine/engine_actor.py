"""The Ray actor that hosts the engine of one data-parallel rank. It makes no decisions of its own.

The actor's methods run in separate Ray concurrency groups, so that slow calls don't delay others:

* `run`: the start of the rank, then the engine's loop.
* `io`: short calls, such as adding and aborting requests. The group has one thread, so calls run in order, and an abort
  never overtakes the request that it aborts.
* `outputs`: one stream of outputs for each client.
* `utility`: calls that wait for a reply from the loop.

No long call runs in the default group, because the channels of Ray's compiled graphs call the actor in that group.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec

from placement.reserve import RankBundles
from raycore.activity import RUNNING, Activity
from raycore.config import DType, EngineConfig
from raycore.engine.core import EngineCore
from raycore.engine.decoding import decode_requests
from raycore.engine.loop import run_loop
from raycore.engine.mailbox import (
    Abort,
    ForgetClient,
    Mailbox,
    PauseForRegrouping,
    Regroup,
    SetActivity,
    StartWave,
    Submit,
    Utility,
)
from raycore.executor.base import Executor
from raycore.kernels import are_compiled
from raycore.messages import EngineInfo
from raycore.node import lifeline
from raycore.node.cpu_features import cpu_features
from raycore.node.garbage import freeze_heap, log_collections
from raycore.node.logs import log_as
from raycore.parts.experts.engine.lockstep import run_lockstep_loop
from raycore.parts.experts.engine.waves import Waves
from raycore.plugins import load_general_plugins
from raycore.ray_api import (
    MAX_STREAMED,
    actor_class,
    end_with_raylet,
    endpoint,
    node_id,
    node_ip,
    own_gpus,
    title_process,
)
from raycore.rpc.start_phases import phases_so_far, process_start
from raycore.system import os, time
from raycore.worker.cpu_dtype import choose_cpu_dtype
from raycore.worker.rank import RankIdentity, Regrouping

logger = logging.getLogger(__name__)

MAX_CLIENTS = 16
"""Maximum number of clients that can receive outputs at the same time. Each client's stream occupies a thread."""


class DPEngineCoreActor:
    """Hosts one rank: an `EngineCore`, the mailbox for its callers, and the loop that connects the two."""

    def __init__(
        self,
        config_bytes: bytes,
        identity: RankIdentity,
        bundles: RankBundles | None,
        name: str,
    ) -> None:
        self._config = EngineConfig.decode(config_bytes)
        self._identity = identity
        self._name = name
        self._bundles = bundles
        self._show_identity()
        end_with_raylet()
        self._mailbox = Mailbox(self._config.parallel.data_parallel_size)
        self._executor: Executor | None = None
        self._core: EngineCore | None = None
        self._phases = process_start()
        """What came before the rank's start. Nothing, if this was a standby."""
        self._peers: list[DPEngineCoreActor] = []
        """The other ranks of the group that shares experts."""
        lifeline.lock()

    def __repr__(self) -> str:
        return self._name

    @endpoint("run")
    def stand_by(self) -> list[int]:
        """Start the worker processes of a standby: a spare engine that isn't any rank yet.

        Returns the ids of all its processes, this one included.
        """
        self._executor = self._make_executor()
        self._executor.stand_by()
        return sorted({os.getpid(), *self._executor.worker_pids()})

    @endpoint("run")
    def adopt(self, identity: RankIdentity, name: str) -> None:
        """Make this standby the rank `identity`. Called after `stand_by()` and before `wait_for_init()`.

        `name` becomes the actor's `repr()`, which Ray's logs show.
        """
        assert self._executor is not None, "stand_by() comes first"
        self._identity, self._name, self._phases = identity, name, []
        self._show_identity()
        self._executor.adopt(identity)

    @endpoint("run")
    def choose_dtype(self) -> DType:
        """Return the dtype that `auto` means on this node's CPU."""
        return choose_cpu_dtype(self._config.model.spec.dtype, cpu_features())

    @endpoint("run")
    def rendezvous(self, dtype: DType | None = None) -> str:
        """Return the address at which the workers of all ranks that share experts connect to each other.

        Call this on only one of the ranks, before `wait_for_init()` and with the same `dtype`.
        """
        self._use_dtype(dtype)
        self._executor = self._make_executor()
        return self._executor.rendezvous()

    @endpoint("utility")
    def next_rendezvous(self) -> str:
        """Return another such address, for a change of the group while this rank runs."""
        assert self._executor is not None, "wait_for_init() comes first"
        return self._executor.rendezvous()

    @endpoint("run")
    def wait_for_init(
        self, rendezvous: str | None = None, dtype: DType | None = None, num_blocks: int | None = None
    ) -> bytes:
        """Initialize the rank. Returns an encoded `EngineInfo`; raises if the rank can't be initialized.

        Args:
            rendezvous: if ranks share experts, the address that one rank's `rendezvous()` returned. Such ranks must be
                initialized at the same time, because their workers wait for each other.
            dtype: used in place of the configured one. None: the configured one.
            num_blocks: if this rank will join ranks that already run, the number of their blocks: see `regroup()`.
        """
        started_s = time.perf_counter()
        self._use_dtype(dtype)
        executor = self._executor = self._executor or self._make_executor()
        name = f"dp{self._identity.dp_rank}_engine"
        self._core = EngineCore(self._config, executor, rendezvous, name, num_blocks, self._identity.dp_rank)
        self._core.profile.add(self._mailbox, take="take_commands", publish="publish")
        executor.register_failure_callback(self._mailbox.fail)
        timings_s = {**self._core.timings_s, "engine": round(time.perf_counter() - started_s, 3)}
        info = EngineInfo(
            dp_rank=self._identity.dp_rank,
            pid=os.getpid(),
            node_id=node_id(),
            num_blocks=self._core.cache.num_blocks,
            block_size=self._config.tokens_per_block,
            max_model_len=self._core.config.model.max_model_len,
            dtype=executor.dtype_name(),
            timings_s=timings_s,
            worker_pids=executor.worker_pids(),
            gpu_ids=executor.collective_rpc("gpu_id") if self._config.device == "cuda" else [],
            kv_cache_dtype=self._config.cache.kv_cache_dtype,
            enable_prefix_caching=self._config.cache.enable_prefix_caching,
            gpu_memory_utilization=self._config.cache.gpu_memory_utilization,
            max_loras=self._config.lora.max_loras if self._config.lora.enable_lora else 0,
            kernels=executor.collective_rpc(are_compiled) if self._may_use_cpu_kernels() else [],
            computations=executor.collective_rpc("computation"),
            cache_layout=self._core.cache.layout,
            kv_addresses=self._core.kv_addresses,
            phases=[*self._phases, *self._core.phases] if self._config.traces.is_on else [],
            worker_phases=executor.collective_rpc(phases_so_far) if self._config.traces.is_on else [],
        )
        self._mailbox.cache_log = self._core.cache_log
        executor.collective_rpc(freeze_heap)
        freeze_heap()
        num_types = self._config.executor.gc_debug
        if num_types is not None:
            executor.collective_rpc(log_collections, args=(num_types,))
            log_collections(self, num_types)
        return msgspec.msgpack.encode(info)

    def _may_use_cpu_kernels(self) -> bool:
        return self._config.device == "cpu" and self._config.model.attention_backend != "torch"

    def _show_identity(self) -> None:
        log_as(self._identity.label, self._config.log_level)
        title_process(f"raycore_{self._config.engine_name}_{self._identity.label}")

    def _use_dtype(self, dtype: DType | None) -> None:
        if dtype is not None:
            self._config = msgspec.structs.replace(
                self._config, model=msgspec.structs.replace(self._config.model, dtype=dtype)
            )

    @endpoint()
    def load_progress(self) -> float:
        """Fraction of the weights that has been read, 0 to 1. May be called while `wait_for_init()` runs."""
        return self._executor.load_progress() if self._executor is not None else 0.0

    @endpoint("run")
    def run(
        self,
        peers: list[DPEngineCoreActor],
        activity: Activity = RUNNING,
        others: Sequence[DPEngineCoreActor] = (),
    ) -> None:
        """Run the engine's loop until `stop()` is called, then stop the workers.

        If the engine fails, this raises at once and leaves the workers running. The supervisor then kills them.

        Args:
            peers: the actors of the other ranks that share experts with this one. Empty if ranks share no experts.
            activity: what the engine does: a rank that joins a paused engine is paused.
            others: the actors of ranks of other servers that share experts with this one.
        """
        assert self._core is not None, "wait_for_init() comes first"
        self._peers = [*peers, *others]
        try:
            self._core.set_activity(activity)
            while not self._mailbox.stopping:
                if self._core.is_in_lockstep:
                    self._run_in_lockstep(self._core, self._peers)
                else:
                    run_loop(self._core, self._mailbox)
        finally:
            self._mailbox.close()
        self._core.shutdown()

    @endpoint("io")
    def start_wave(self, wave: int, generation: int) -> None:
        """Tell this engine that another engine of its group has started wave number `wave`. See `waves`."""
        self._mailbox.put(StartWave(wave, generation))

    @endpoint("io")
    def step_age_s(self) -> float:
        """For how long this rank has made no progress, in seconds. The supervisor polls this to detect stalls."""
        return self._core.step_age_s() if self._core is not None else 0.0

    @endpoint("io", replies=False)
    def submit(self, requests: bytes) -> None:
        """Add requests: an encoded list of `EngineRequest`. If one can't be decoded, only that request fails."""
        try:
            self._mailbox.put(Submit(*decode_requests(requests)))
        except Exception as error:
            # No caller reads the result of this call, and the seq_ids in the message are unknown, so no request can be
            # refused. Make the rank fail instead: clients then move its requests to other ranks.
            self._mailbox.fail(error)
            raise

    @endpoint("io", replies=False)
    def abort(self, seq_ids: list[int]) -> None:
        """Abort requests. Unknown seq_ids are ignored."""
        self._mailbox.put(Abort(seq_ids))

    @endpoint("io")
    def forget_client(self, client: int, is_gone: bool = True, connection: int = 0) -> None:
        """Abort all requests of a client, and end its output stream.

        Args:
            is_gone: whether its process has ended. If not, it may connect to this rank again.
            connection: which of its connections to this rank it has left then.
        """
        self._mailbox.put(ForgetClient(client, is_gone, connection))

    @endpoint("outputs")
    def outputs(self, client: int, connection: int) -> Iterator[bytes]:
        """Yield the encoded `OutputBatch`es of one connection of a client.

        Ends after `MAX_STREAMED` of them, and earlier if the engine stops or the client is forgotten.
        """
        for batch in islice(self._mailbox.outputs(client, connection), MAX_STREAMED):  # noqa: UP028 - Ray sends to the generator
            yield batch

    @endpoint("utility")
    def utility(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float) -> Any:
        """Have the loop call a function of `Utilities` between two steps. Returns its result.

        Waits at most `timeout_s` seconds for the result.
        """
        command = Utility(method, args, kwargs)
        self._mailbox.put(command)
        return command.reply.result(timeout_s)

    @endpoint("utility")
    def set_activity(self, activity: Activity, clear_cache: bool, timeout_s: float) -> dict[int, int]:
        """Have the loop change to `activity` when the steps in flight have ended, or the wave if ranks share experts.

        Waits at most `timeout_s` seconds for that. No outputs are sent afterwards while the activity is a pause.

        Args:
            clear_cache: drop the keys and values of all requests, and the prefix cache.

        Returns: the result of `Mailbox.flush()`.
        """
        command = SetActivity(activity, clear_cache)
        self._mailbox.put(command)
        return command.reply.result(timeout_s)

    @endpoint("utility")
    def pause_for_regrouping(self, timeout_s: float) -> None:
        """Have the loop run no more steps. Waits at most `timeout_s` seconds until those in flight have ended.

        If ranks share experts, their wave has to end for that, so all of them have to be told.
        """
        command = PauseForRegrouping()
        self._mailbox.put(command)
        command.reply.result(timeout_s)

    @endpoint("utility")
    def regroup(self, regrouping: Regrouping, peers: list[DPEngineCoreActor], timeout_s: float) -> list[str]:
        """Have the loop join another group of ranks that share experts, and go on. Waits at most `timeout_s` seconds.

        All ranks that stay, come or leave must do this at the same time, when all of them are paused.

        `peers`: the other ranks of the new group.

        Returns: `EngineInfo.kv_addresses`, which a rank that is new hasn't had before.
        """
        self._peers = peers
        command = Regroup(regrouping, stays=self._identity.dp_rank < regrouping.num_ranks)
        self._mailbox.put(command)
        command.reply.result(timeout_s)
        return [] if self._core is None else self._core.kv_addresses

    @endpoint("io")
    def stop(self) -> None:
        """Make `run()` return after the current step or, if ranks share experts, after the current wave."""
        self._mailbox.stop()

    def _run_in_lockstep(self, core: EngineCore, peers: list[DPEngineCoreActor]) -> None:
        waves = Waves(self._config.parallel.dp_sync_interval, core.generation)

        def tell_peers(wave: int) -> None:
            for peer in peers:
                peer.start_wave.remote(wave, waves.generation)

        run_lockstep_loop(core, self._mailbox, waves, tell_peers)

    def _make_executor(self) -> Executor:
        load_general_plugins(self._config.plugins)
        if self._config.executor.backend == "inline":
            from raycore.executor.inline import InlineExecutor

            identity = self._identity
            if self._config.device == "cuda" and not identity.gpu_ids:
                identity = msgspec.structs.replace(identity, gpu_ids=own_gpus()[:1])
            return InlineExecutor(self._config, identity, node_ip())
        from raycore.executor.ray_executor import RayExecutor

        return RayExecutor(self._config, self._identity, self._bundles)


DP_ENGINE_CORE_ACTOR = actor_class(
    DPEngineCoreActor, concurrency_groups={"run": 1, "io": 1, "outputs": MAX_CLIENTS, "utility": 4}
)
"""`DPEngineCoreActor` as a Ray actor class."""
