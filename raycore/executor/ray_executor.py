"""`RayExecutor`: worker actors in the bundles of their rank's placement group, called through a transport.

`WorkerGroup` starts the actors, finds out why an actor has ended, and kills them. `RayExecutor` sends them work.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from typing import TYPE_CHECKING, Any, TypeVar

from ray.exceptions import RayError

from placement.reserve import RankBundles
from raycore.config import EngineConfig
from raycore.errors import EngineDeadError, InitializationError, RaycoreError, WorkerDied, WorkerFailed
from raycore.executor.base import Executor, FailureCallback, WorkerCall
from raycore.messages import GrammarOutput, StepPlan, StepResult
from raycore.node.processes import wait_until_gone
from raycore.ray_api import amounts, cause_of, get, get_all, has_ended, in_bundle, kill, node_id, on_node, wait
from raycore.rpc.actor_call import ActorCallTransport
from raycore.rpc.channel import ChannelTransport
from raycore.rpc.client import RpcClient, SentCall
from raycore.rpc.pending import PendingCall
from raycore.rpc.transport import Transport
from raycore.rpc.wire import encode_call
from raycore.system import threading, time, uuid
from raycore.worker.rank import RankIdentity, WorkerRank
from raycore.worker.worker_actor import WORKER_ACTOR, WorkerActor, WorkerAddress

if TYPE_CHECKING:
    from ray import ObjectRef

T = TypeVar("T")

logger = logging.getLogger(__name__)

WATCH_S = 1.0
"""Interval, in seconds, at which the monitor checks whether the executor is stopping. It notices the end of a worker at
once."""
CAUSE_WAIT_S = 2.0
"""How long, in seconds, a call whose transport has closed waits for the monitor to find the cause."""
HEALTH_TIMEOUT_S = 10.0
_ANSWER_S = 1.0
"""How long, in seconds, to wait for an answer that a worker gives at once unless its process is stopped or busy."""
EXIT_WAIT_S = 2.0


class WorkerGroup:
    """The worker actors of one engine."""

    def __init__(self, config: EngineConfig, identity: RankIdentity, bundles: RankBundles | None) -> None:
        self._config = config
        self._identity = identity
        self.addresses: list[WorkerAddress] = []
        self.actors: list[WorkerActor] = []
        self.take_masks = False
        """Whether all workers, which have started, can be given masks."""
        # Ray may still hold the names of a predecessor's workers
        engine, unique = f"raycore_{config.engine_name}_{identity.label}", uuid.uuid4().hex[:8]
        config_bytes = config.encode()
        parallel = config.parallel
        for rank in range(parallel.world_size):
            pp_rank, pcp_rank, tp_rank = parallel.place(rank)
            stage = f"_pp{pp_rank}" if parallel.pipeline_parallel_size > 1 else ""
            context = f"_pcp{pcp_rank}" if parallel.prefill_context_parallel_size > 1 else ""
            name = f"{engine}{stage}{context}_tp{tp_rank}"
            self.actors.append(
                WORKER_ACTOR.options(name=f"{name}_{unique}", **_options(bundles, rank)).remote(config_bytes, name)
            )

    def find(self) -> None:
        """Wait until the workers' processes have started, and store the workers' addresses. Idempotent.

        Raises:
            InitializationError: a worker did not start.
        """
        if not self.addresses:
            deadline_s = time.monotonic() + self._config.executor.init_timeout_s
            self.addresses = self._gather([actor.address.remote() for actor in self.actors], deadline_s)

    def stand_by(self) -> None:
        """Wait until the workers' processes have started and have imported the worker class."""
        self._prepare(time.monotonic() + self._config.executor.init_timeout_s, yields=True)

    def adopt(self, identity: RankIdentity) -> None:
        """Make a standby's workers those of rank `identity`."""
        self._identity = identity

    def start(self, rendezvous: str | None, *, is_new: bool) -> Transport:
        """Connect to the workers, start all of them at the same time, and load their weights.

        Returns: the transport to the workers.

        Raises:
            InitializationError: a worker failed. The message has the first failure's traceback.
        """
        deadline_s = time.monotonic() + self._config.executor.init_timeout_s
        self._prepare(deadline_s)
        transport = self._connect()
        try:
            joins = [actor.join.remote(transport.invite(i)) for i, actor in enumerate(self.actors)]
            for rank, answer in enumerate(self._gather(joins, deadline_s)):
                transport.accept(rank, answer)
            transport.finish_joining()
            meeting = self.offer_meeting(deadline_s) if len(self.actors) > 1 else None
            ranks = [
                rank.with_experts(self._config.parallel, rendezvous) for rank in self._ranks(meeting, is_new=is_new)
            ]
            starts = [actor.start.remote(rank) for actor, rank in zip(self.actors, ranks, strict=True)]
            self.take_masks = all(self._gather(starts, deadline_s))
        except BaseException:
            transport.close()
            raise
        return transport

    def offer_meeting(self, deadline_s: float) -> str:
        """Have worker 0 listen at a new address, at which it and other workers will meet. Returns the address.

        Raises:
            InitializationError: it failed.
        """
        return self._gather([self.actors[0].offer_meeting.remote()], deadline_s)[0]

    def failure(self, rank: int, ended: ObjectRef[None]) -> WorkerDied | WorkerFailed:
        """Why a worker stopped serving. `ended` is the completed ref of its `serve()` or `wait_until_stopped()`."""
        pid, node = (self.addresses[rank].pid, self.addresses[rank].node_id) if self.addresses else (None, None)
        try:
            get(ended)
        except RayError as error:
            if has_ended(error):
                return WorkerDied(rank, pid, node, _cause(error))
            return WorkerFailed(rank, _summary(error), str(error))
        return WorkerDied(rank, pid, node, "it stopped serving without being asked to")

    def kill(self) -> None:
        """Kill the workers' processes, and wait up to `EXIT_WAIT_S` for those on this node to end."""
        for actor in self.actors:
            kill(actor)
        here = node_id()
        pids = [address.pid for address in self.addresses if address.node_id == here]
        wait_until_gone(pids, EXIT_WAIT_S)

    def _prepare(self, deadline_s: float, yields: bool = False) -> None:
        self._gather([actor.preload.remote(yields) for actor in self.actors], deadline_s)
        self.find()

    def _ranks(self, meeting: str | None, *, is_new: bool) -> list[WorkerRank]:
        parallel, identity = self._config.parallel, self._identity
        num_on_node: Counter[str] = Counter()
        ranks: list[WorkerRank] = []
        for worker, address in enumerate(self.addresses):
            pp_rank, pcp_rank, tp_rank = parallel.place(worker)
            ranks.append(
                WorkerRank(
                    dp_rank=identity.dp_rank,
                    tp_rank=tp_rank,
                    tp_size=parallel.tensor_parallel_size,
                    local_rank=num_on_node[address.node_id],
                    num_local_workers=identity.num_workers_on(address.node_id),
                    distributed_init=meeting,
                    gpu_id=identity.gpu_of(worker),
                    pp_rank=pp_rank,
                    pp_size=parallel.pipeline_parallel_size,
                    pcp_rank=pcp_rank,
                    pcp_size=parallel.prefill_context_parallel_size,
                    dcp_size=parallel.decode_context_parallel_size,
                    is_new=is_new,
                )
            )
            num_on_node[address.node_id] += 1
        return ranks

    def _connect(self) -> Transport:
        settings = self._config.executor
        if settings.transport == "channel":
            window_s = math.inf if settings.wait == "spin" else settings.spin_window_s
            nodes = [address.node_id for address in self.addresses]
            try:
                return ChannelTransport(
                    self.actors,
                    nodes,
                    settings.channel_capacity_bytes,
                    window_s,
                    stage_size=self._config.parallel.stage_size,
                )
            except (RayError, OSError, ValueError) as error:
                logger.warning(
                    "no channel to the workers could be created, falling back to slower actor calls: %s",
                    error,
                )
        return ActorCallTransport(self.actors)

    def _gather(self, refs: list[ObjectRef[T]], deadline_s: float) -> list[T]:
        """The values of `refs`, which are calls of the workers, in rank order.

        Raises:
            InitializationError: a call failed; describes the first failure. Or the deadline has passed.
        """
        waiting = refs
        while waiting:
            ready, waiting = wait(waiting, num_returns=1, timeout_s=max(0.0, deadline_s - time.monotonic()))
            if not ready:
                late = ", ".join(map(str, sorted({refs.index(ref) % len(self.actors) for ref in waiting})))
                raise InitializationError(
                    f"workers [{late}] of dp_rank {self._identity.dp_rank} didn't start within "
                    f"init_timeout_s={self._config.executor.init_timeout_s:g}: raise it if the checkpoint is just large"
                )
            self._check_started(refs.index(ready[0]) % len(self.actors), ready[0])
        return get_all(refs)

    def _check_started(self, rank: int, ref: ObjectRef[Any]) -> None:
        try:
            get(ref)
        except RayError as error:
            if not has_ended(error):
                text = f"worker {rank} failed while starting: {_summary(error)}\n{error}"
                raise InitializationError(text) from cause_of(error)
            pid = f" (pid {self.addresses[rank].pid})" if self.addresses else ""
            raise InitializationError(f"worker {rank}{pid} died while starting: {_cause(error)}") from error


class RayExecutor(Executor):
    """An executor whose workers are Ray actors.

    Any thread may call `shutdown()`, `load_progress()` and `workers_answer()`. Other calls must come from one thread at
    a time.
    """

    def __init__(self, config: EngineConfig, identity: RankIdentity, bundles: RankBundles | None) -> None:
        """Store the arguments, without starting anything.

        The workers run in the first `world_size` of `bundles`. With None, the workers reserve no resources and run on
        this node: those of a rank that has given GPUs, or of a standby. A standby that replaces a rank uses the
        resources that the rank's group still holds.
        """
        super().__init__(config.executor, config.parallel.world_size - config.parallel.stage_size)
        self._config = config
        self._identity = identity
        self._bundles = bundles
        self.max_concurrent_batches = config.max_steps_in_flight
        self._workers: WorkerGroup | None = None
        self._transport: Transport | None = None
        self._client: RpcClient | None = None
        self._serving: list[ObjectRef[None]] = []
        self._lock = threading.Lock()
        self._stopping = False
        self._failure: BaseException | None = None
        self._failed = threading.Event()
        self._callbacks: list[FailureCallback] = []

    def stand_by(self) -> None:
        try:
            self._start_processes().stand_by()
        except BaseException:
            self.shutdown()
            raise

    def adopt(self, identity: RankIdentity) -> None:
        self._identity = identity
        self._start_processes().adopt(identity)

    def rendezvous(self) -> str:
        """Starts the workers' processes."""
        if self._client is not None:
            return get(self._start_processes().actors[0].offer_meeting.remote(), timeout_s=HEALTH_TIMEOUT_S)
        try:
            return self._start_processes().offer_meeting(time.monotonic() + self._settings.init_timeout_s)
        except BaseException:
            self.shutdown()
            raise

    def initialize(self, rendezvous: str | None = None, *, is_new: bool = False) -> None:
        try:
            workers = self._start_processes()
            self._transport = workers.start(rendezvous, is_new=is_new)
        except BaseException:
            self.shutdown()
            raise
        self.takes_masks = workers.take_masks
        self._client = RpcClient(self._transport, len(workers.actors), self._why_closed)
        self._client.late_failure = self._fail
        self._serving = self._transport.start()
        threading.Thread(target=self._watch, name="raycore-worker-monitor", daemon=True).start()

    def load_progress(self) -> float:
        """Asks only worker 0, because all workers read at the same pace."""
        if self._workers is None or not self._workers.actors:
            return 0.0
        return get(self._workers.actors[0].load_progress.remote(), timeout_s=HEALTH_TIMEOUT_S)

    def execute(self, plan: StepPlan) -> PendingCall[StepResult]:
        return self._ready().step(plan, self._settings.execute_timeout_s, self._step_aggregate)

    def sample_tokens(self, step: PendingCall[StepResult], grammar: GrammarOutput) -> PendingCall[StepResult]:
        assert isinstance(step, SentCall)
        self._ready().sample_tokens(step, grammar, self._settings.execute_timeout_s)
        return step

    def start_call(self, call: WorkerCall, timeout_s: float) -> PendingCall[Any]:
        payload = encode_call(call.method, call.args, call.kwargs, call.reply_rank)
        return self._ready().call(call.method, payload, call.reply_rank, call.aggregate, timeout_s)

    def register_failure_callback(self, callback: FailureCallback) -> None:
        with self._lock:
            self._callbacks.append(callback)
            failure = self._failure
        if failure is not None:
            callback(failure)

    def check_health(self) -> None:
        if self._failure is not None:
            raise self._failure
        self.collective_rpc("check_health", HEALTH_TIMEOUT_S)

    def workers_answer(self) -> bool:
        """Says nothing of workers that have died."""
        actors = self._workers.actors if self._workers is not None else []
        asked = [actor.load_progress.remote() for actor in actors]
        return not asked or not wait(asked, num_returns=len(asked), timeout_s=_ANSWER_S)[1]

    def worker_pids(self) -> list[int]:
        """The workers' process ids, in rank order."""
        return [address.pid for address in self._workers.addresses] if self._workers is not None else []

    def shutdown(self) -> None:
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
        if self._client is not None and self._failure is None:
            self._ask_to_stop(self._client)
        if self._transport is not None:
            self._transport.close()
        if self._workers is not None:
            self._workers.kill()

    def _start_processes(self) -> WorkerGroup:
        if self._workers is None:
            self._workers = WorkerGroup(self._config, self._identity, self._bundles)
        return self._workers

    def _ready(self) -> RpcClient:
        if self._failure is not None:
            raise self._failure
        if self._client is None or self._stopping:
            raise EngineDeadError("the executor has no workers: it was shut down or never initialized")
        return self._client

    def _ask_to_stop(self, client: RpcClient) -> None:
        timeout_s = self._settings.shutdown_timeout_s
        try:
            client.stop(timeout_s)
        except RaycoreError as error:
            logger.warning("killing the workers, because the request to stop couldn't be sent: %s", error)
            return
        _, busy = wait(self._serving, num_returns=len(self._serving), timeout_s=timeout_s)
        if busy:
            logger.warning("killing %d workers that didn't stop within shutdown_timeout_s=%g", len(busy), timeout_s)

    def _watch(self) -> None:
        """Wait until a worker ends, and report that as the executor's failure. Runs on the monitor thread."""
        assert self._workers is not None
        while not self._stopping:
            ended, _ = wait(self._serving, num_returns=1, timeout_s=WATCH_S)
            if ended and not self._stopping:
                self._fail(self._workers.failure(self._serving.index(ended[0]), ended[0]))
                return

    def _fail(self, failure: WorkerDied | WorkerFailed) -> None:
        with self._lock:
            if self._failure is not None or self._stopping:
                return
            self._failure = failure
            callbacks = list(self._callbacks)
        logger.error("%s", failure)
        self._failed.set()
        assert self._transport is not None
        self._transport.close()
        for callback in callbacks:
            callback(failure)

    def _why_closed(self) -> BaseException:
        if not self._stopping:
            self._failed.wait(CAUSE_WAIT_S)
        return self._failure or EngineDeadError("the executor was shut down while a call was waiting for its workers")


def _options(bundles: RankBundles | None, rank: int) -> dict[str, Any]:
    """Ray's options for the actor of worker `rank`. Without bundles, it reserves no resources and runs on this node."""
    if bundles is None:
        return {"num_cpus": 0, "scheduling_strategy": on_node(node_id())}
    return {
        **amounts(bundles.worker),
        "scheduling_strategy": in_bundle(bundles.group, bundles.indices[rank]),
    }


def _summary(error: RayError) -> str:
    cause = cause_of(error)
    return f"{type(cause).__name__}: {cause}"


def _cause(error: RayError) -> str:
    """Why an actor died, according to Ray's error message, on one line. Leaves out the actor's id and address."""
    text = str(error)
    return " ".join(text.rpartition("The actor is dead because ")[2].split())
