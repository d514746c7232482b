"""The engine of one data-parallel rank: schedules steps, executes them, and updates requests from the results.

`EngineCore` connects a scheduler to an executor. `run_loop` applies the commands in a mailbox, runs steps, and puts
their outputs into the mailbox. This module imports neither Ray nor torch.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from raycore.activity import RUNNING, Activity
from raycore.config import EngineConfig
from raycore.config.profiler import checked_prefix, session_config
from raycore.engine.adapters import AdaptersInUse
from raycore.engine.engine_profile import EngineProfile
from raycore.engine.failed_step import describe_failed_step
from raycore.engine.grammars import GrammarsUnderWay
from raycore.engine.mailbox import (
    Abort,
    Change,
    Command,
    ForgetClient,
    Hold,
    Mailbox,
    Regroup,
    SetActivity,
    StartWave,
    Submit,
    Utility,
)
from raycore.engine.progress import Progress
from raycore.engine.utility import call_utility
from raycore.errors import InvalidConfig, InvalidRequest, WorkerFailed
from raycore.executor.base import Executor
from raycore.lora.added import AddedAdapter, AddedAdapters
from raycore.messages import EngineRequest, LoadView, StepPlan, StepResult
from raycore.node.garbage import freeze_heap
from raycore.pending import Pending
from raycore.scheduler.outputs import StepOutputs
from raycore.scheduler.protocol import load_scheduler_class
from raycore.speculation.speculation import Speculation
from raycore.speculation.worker_guesses import WorkerGuesses
from raycore.worker.rank import MemoryNeed, Regrouping

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 1.0
"""Maximum time in seconds that an idle loop sleeps. A command or a failure wakes the loop at once."""
_PREPARING_WAIT_S = 0.002
"""Maximum time in seconds that the loop sleeps while requests wait for their grammars or adapters, and no other request
has work."""


class EngineCore:
    """The scheduler and the workers of one data-parallel rank."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        rendezvous: str | None = None,
        name: str = "engine",
        num_blocks: int | None = None,
    ) -> None:
        """Start the workers, choose the size of the KV cache, and allocate the cache. If that fails, stop the workers.

        Args:
            rendezvous: the address `tcp://host:port` at which the workers of ranks that share experts connect to each
                other; None if ranks share no experts.
            name: the engine's name in the names of profiles' files.
            num_blocks: the size of the KV cache of ranks that already run, which this new one will join. Its workers
                then load and allocate nothing, and the engine holds, until `regroup()`. None: the engine is complete.

        Raises:
            InitializationError: a worker failed to start.
            InvalidConfig: the free memory can't hold one request of `max_model_len` tokens, or `scheduler_cls` can't be
                imported.
        """
        self.config = config
        self.executor = executor
        self.timings_s: dict[str, float] = {}
        started_s = time.perf_counter()
        try:
            scheduler_class = load_scheduler_class(config.scheduler)  # fails before weights are loaded
            executor.initialize(rendezvous, is_new=num_blocks is not None)
            self._lap("workers_and_weights", started_s)
            self.num_blocks = self._start_cache() if num_blocks is None else num_blocks
        except BaseException:
            executor.shutdown()
            raise
        self._speculation = None
        if config.speculative_config is not None:
            drafter, take = config.drafter, executor.take_draft_token_ids
            source = None if drafter is None else WorkerGuesses(drafter, take)
            self._speculation = Speculation(config.speculative_config, config.scheduler.max_num_seqs, source)
        self.scheduler = scheduler_class(
            config.scheduler,
            config.cache,
            self.num_blocks,
            config.model.spec.vocab_size,
            tells_tokens=config.tells_tokens,
            num_turns=_num_turns(config),
            speculation=self._speculation,
            max_adapters=config.lora.max_loras if config.lora.enable_lora else 0,
        )
        self._grammars = GrammarsUnderWay(executor)
        self._adapters = AdaptersInUse(executor, config.lora.num_held) if config.lora.enable_lora else None
        self._in_flight: deque[tuple[StepPlan, Pending[StepResult], float]] = deque()
        """(plan, pending result, time of planning) of each step in flight, oldest first."""
        self._arrived_s: dict[int, float] = {}
        """Arrival times by seq_id, of requests whose first step has no result yet."""
        self._progress = Progress(executor.workers_answer)
        self._activity = RUNNING
        """What this rank follows."""
        self._is_paused = False
        """Whether no steps are planned."""
        self._has_cache = True
        self._is_new = num_blocks is not None
        """Whether the workers wait for their weights."""
        self._is_holding = self._is_new
        """Whether no steps are planned, because the ranks that share experts are about to change."""
        self.generation = 0
        """The number of the present group of ranks that share experts, among all that there have been."""
        self.profile = EngineProfile(name, executor)
        self.profile.add(self, step="step", lockstep_step="step")
        self.profile.add(self.scheduler, schedule="schedule", update="update")
        self._plan: StepPlan | None = None
        """The plan of the current step, which the log describes if the step fails. None before the plan is made."""
        logger.info(
            "the KV cache holds %d tokens (%d blocks of %d)",
            self.num_blocks * config.cache.block_size,
            self.num_blocks,
            config.cache.block_size,
        )

    def submit(self, request: EngineRequest) -> None:
        """Add a request.

        Raises:
            InvalidRequest: the request is invalid or could never run. Other requests are not affected.
        """
        asked, adapter = request.params.structured_outputs, request.lora
        if adapter is not None:
            if self._adapters is None:
                raise InvalidRequest(f"lora_request={adapter.lora_name!r} needs an engine with enable_lora=True")
            self._adapters.check(adapter)
        self.scheduler.submit(request, is_held=asked is not None or adapter is not None)
        if asked is not None:
            self._grammars.add(request.seq_id, asked)
        if adapter is not None and self._adapters is not None:
            self._adapters.add(request.seq_id, adapter, request.lora_edition)
        self._arrived_s[request.seq_id] = time.monotonic()

    def abort(self, seq_ids: list[int]) -> None:
        """Abort requests. They produce no more outputs."""
        self.scheduler.abort(seq_ids)
        for seq_id in seq_ids:
            self._grammars.drop(seq_id)
            self._drop_adapter(seq_id)
            self._arrived_s.pop(seq_id, None)

    def abort_client(self, client: int) -> None:
        """Abort all requests of the client with the index `client`. They produce no more outputs."""
        self.abort(self.scheduler.seq_ids_of(client))

    def release_prepared(self) -> dict[int, str]:
        """Let the scheduler start requests whose grammars are ready or took too long, and whose adapters are ready.

        Call this before each step. Returns why requests were dropped, by seq_id, because their adapters can't be used.
        """
        prepared = self._grammars.take_done()
        if self._adapters is None:
            self.scheduler.release(prepared)
            return {}
        ready, failed = self._adapters.take_done()
        for seq_id, adapter in ready.items():
            self.scheduler.give_adapter(seq_id, adapter.place, adapter.version)
        self.scheduler.release(seq_id for seq_id in prepared if seq_id not in self._adapters and seq_id not in failed)
        self.scheduler.release(seq_id for seq_id in ready if seq_id not in self._grammars and seq_id not in prepared)
        self.abort(list(failed))
        return failed

    def idle_wait_s(self) -> float:
        """The maximum time in seconds that the loop may sleep without work. Shorter while requests are prepared."""
        return _PREPARING_WAIT_S if self._grammars or self._adapters else IDLE_WAIT_S

    def _drop_adapter(self, seq_id: int) -> None:
        if self._adapters is not None:
            self._adapters.drop(seq_id)

    def step(self) -> StepOutputs | None:
        """Start the next step if there is one. Then wait for the oldest step in flight, and return its outputs.

        Returns None without waiting if no step is in flight, or if a step was started and another may be started before
        its result arrives.
        """
        with self._reported(), self._progress.step():
            return self._step()

    def step_age_s(self) -> float:
        """See `Progress.age_s`. May be called from any thread."""
        return self._progress.age_s()

    @contextmanager
    def _reported(self) -> Generator[None, None, None]:
        """Log the engine's state if the body of the `with` statement raises."""
        self._plan = None
        try:
            yield
        except Exception as error:
            seq_ids = [] if self._plan is None else self.scheduler.seq_ids_in_flight(self._plan.step)
            logger.error("%s", describe_failed_step(error, self._plan, seq_ids, self.load(), self.config))
            raise

    def _step(self) -> StepOutputs | None:
        plan = None
        if len(self._in_flight) < self.executor.max_concurrent_batches:
            planned_s = time.monotonic()
            plan = self._plan = self._schedule()
            if plan is not None:
                self._in_flight.append((plan, self.executor.execute(plan), planned_s))
        if not self._in_flight:
            return None
        if plan is not None and len(self._in_flight) < self.executor.max_concurrent_batches:
            return None  # the workers are busy: plan another step before waiting for a result
        plan, pending, planned_s = self._in_flight.popleft()
        self._plan = plan
        return self._update(plan, pending.result(self.config.executor.execute_timeout_s), planned_s)

    def _schedule(self) -> StepPlan | None:
        return None if self._is_at_rest else self.scheduler.schedule()

    @property
    def _is_at_rest(self) -> bool:
        """Whether no steps are planned."""
        return self._is_paused or self._is_holding

    def _update(self, plan: StepPlan, result: StepResult, planned_s: float) -> StepOutputs:
        outputs = self.scheduler.update(plan, result)
        outputs.duration_s = time.monotonic() - planned_s
        if self._speculation is not None:
            self._speculation.observe(plan.num_step_tokens, plan.has_drafts, outputs.duration_s)
        if self._adapters is not None:
            editions = [(seq_id, self._adapters.edition(seq_id)) for seq_id, _ in outputs.started]
            self._adapters.note_begun(seq_id for seq_id, _ in outputs.started)
            outputs.editions = [(seq_id, edition) for seq_id, edition in editions if edition is not None]
        for end in outputs.finished:
            self._drop_adapter(end.seq_id)
        outputs.queued = [(seq_id, planned_s - self._arrived_s.pop(seq_id)) for seq_id, _ in outputs.started]
        return outputs

    def lockstep_step(self) -> tuple[StepOutputs | None, bool]:
        """Plan and execute one step of a wave (see `waves`), and wait for its result.

        If this engine has nothing to compute, the step is a dummy step.

        Returns: the step's outputs (None for a dummy step), and whether any of the engines that share experts had a
        token to compute.
        """
        with self._reported():
            planned_s = time.monotonic()
            plan = self._plan = self._schedule()
            if plan is None:
                return None, self.dummy_step()
            return self._execute_now(plan, planned_s)

    def _execute_now(self, plan: StepPlan, planned_s: float) -> tuple[StepOutputs, bool]:
        with self._progress.step():
            result = self.executor.execute(plan).result(self.config.executor.execute_timeout_s)
            return self._update(plan, result, planned_s), result.is_anyone_busy

    def dummy_step(self, timeout_s: float | None = None) -> bool:
        """Run a step in which this engine has no token. Engines that share experts can only run a step all together.

        Args:
            timeout_s: how long to wait for the other engines, in seconds; None: `execute_timeout_s`.

        Returns: whether any of the engines had a token to compute.

        Raises:
            RpcTimeout: the other engines didn't take part in time.
        """
        timeout_s = self.config.executor.execute_timeout_s if timeout_s is None else timeout_s
        with self._progress.step():
            return self.executor.execute_dummy_batch().result(timeout_s).is_anyone_busy

    def has_work(self) -> bool:
        """Whether a step is in flight, or a request waits or runs and the rank is neither paused nor holding.

        Requests that wait for grammars don't count.
        """
        return bool(self._in_flight) or (not self._is_at_rest and self.scheduler.has_work())

    def load(self) -> LoadView:
        """The numbers of waiting and running requests, the share of the KV cache in use, counters, and adapters."""
        load = self.scheduler.load()
        return load if self._adapters is None else msgspec.structs.replace(load, adapters=self._adapters.use())

    # ---- pause and sleep

    def pause(self) -> None:
        """Plan no more steps. `follow()` completes the pause when no step is in flight."""
        self._is_paused = True

    def follow(self, activity: Activity, *, clear_cache: bool = False) -> None:
        """Change what this rank does. Requests stay; if their keys and values are dropped, they are computed again.

        Blocks while memory is given up or allocated again, and while weights are loaded. If ranks share experts, they
        must do this at the same time.

        Args:
            activity: what the rank does from now on. If it is a pause or a sleep, no step may be in flight.
            clear_cache: drop the keys and values of all requests, and the prefix cache.

        Raises: what a worker raised. The rank can't continue afterwards.
        """
        assert not (activity.is_paused and self._in_flight), "finish the steps in flight first"
        before, self._activity = self._activity, activity
        if clear_cache:
            self.scheduler.reset_prefix_cache(reset_running_requests=True)
        with self._progress.long_work():
            self._move_memory(before)
        self._is_paused = activity.is_paused

    def _move_memory(self, before: Activity) -> None:
        """Give up the memory that is asleep now, and get back what is awake. `before`: the activity before this one."""
        activity = self._activity
        falling_asleep = activity.falling_asleep_from(before)
        if falling_asleep:
            self._has_cache = self._has_cache and "kv_cache" not in falling_asleep
            if self._adapters is not None and "weights" in falling_asleep:
                self._adapters.sleep(drops=activity.sleep_level >= 2)
            self.executor.sleep(activity.sleep_level, falling_asleep)
            if not self._has_cache:
                self.scheduler.start_over()
        if "weights" in activity.waking_from(before):
            self.executor.wake_up(["weights"])
            if self._adapters is not None:
                self._adapters.wake(self.config.executor.init_timeout_s)
        if not (self._has_cache or activity.asleep):
            # needs the weights, so it waits for them even if the caller wakes the cache first
            self.executor.initialize_cache(self.num_blocks)
            self.executor.collective_rpc(freeze_heap)
            self._has_cache = True

    # ---- another number of ranks that share experts

    def hold(self) -> None:
        """Plan no more steps until `regroup()`. Requests stay."""
        self._is_holding = True

    def regroup(self, regrouping: Regrouping, *, stays: bool) -> None:
        """Join another group of ranks that share experts, with the same requests, and go on.

        All ranks that stay, come or leave must do this at the same time, while they hold.

        Args:
            stays: whether this rank belongs to the new group. One that doesn't goes on holding.

        Raises: what a worker raised. The rank can't continue afterwards.
        """
        assert self._is_holding, "hold() comes first"
        assert not self._in_flight, "finish the steps in flight first"
        config = self.config = self.config.with_num_ranks(regrouping.num_ranks)
        self.executor.regroup(regrouping, config)
        self.generation = regrouping.generation
        if not stays:
            return
        if self._is_new:
            self.executor.initialize_cache(self.num_blocks)
            self.executor.collective_rpc(freeze_heap)
        elif regrouping.num_ranks > regrouping.num_ranks_before:
            self.executor.collective_rpc("accompany_warm_up")
        self.scheduler.take_turns(_num_turns(config))
        self._is_new = self._is_holding = False

    @property
    def is_in_lockstep(self) -> bool:
        """Whether this rank runs every step together with others."""
        return self.config.parallel.is_lockstep and not self._is_holding

    def shutdown(self) -> None:
        """Stop the workers, and write the profile that is running, if any. Idempotent."""
        try:
            self.profile.stop()
        except OSError:
            logger.exception("the engine's profile is lost")
        self.executor.shutdown()

    # ---- utilities: methods that clients call by name

    def utility_reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Call `Scheduler.reset_prefix_cache`, and return the result."""
        return self.scheduler.reset_prefix_cache(reset_running_requests)

    def utility_collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call `Executor.collective_rpc` on this rank's workers, and return the result."""
        return self.executor.collective_rpc(method, timeout, args, kwargs)

    def utility_begin_adapter(self, adapter: AddedAdapter) -> Future[None]:
        """Call `AdaptersInUse.begin`, and return the result."""
        return self._adapters_in_use().begin(adapter)

    def utility_give_up_adapter(self, edition: int) -> None:
        """Call `AdaptersInUse.give_up`."""
        self._adapters_in_use().give_up(edition)

    def utility_follow_adapters(self, added: AddedAdapters, wanted: list[int]) -> Future[dict[int, str]]:
        """Call `AdaptersInUse.follow`, and return the result."""
        return self._adapters_in_use().follow(added, wanted)

    def _adapters_in_use(self) -> AdaptersInUse:
        assert self._adapters is not None, "the driver checks enable_lora"
        return self._adapters

    def utility_check_health(self) -> None:
        """Raise an error if a worker has failed or died, or doesn't answer in time."""
        self.executor.check_health()

    def utility_load(self) -> LoadView:
        """The same as `load()`."""
        return self.load()

    def utility_memory_need(self, num_ranks: int, num_local_workers: list[int]) -> list[MemoryNeed]:
        """Call `Worker.memory_need` on each worker."""
        return self.executor.collective_rpc("memory_need", args=(num_ranks, num_local_workers, self.num_blocks))

    def utility_profile(
        self,
        is_start: bool = True,
        profile_prefix: str | None = None,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Start or end a profile of this engine and its workers, each of which writes a file.

        Raises:
            InvalidInput: an argument is invalid, or a profile is running.
            OSError: the engine's file can't be written.
            WorkerFailed: a worker's file can't be written.
        """
        config = session_config(self.config.profiler_config, delay_iterations, max_iterations)
        if not is_start:
            try:
                self.executor.collective_rpc("profile", args=(False,))
            finally:
                self.profile.stop()
            return
        self.profile.start(config, checked_prefix(profile_prefix))
        try:
            self.executor.collective_rpc("profile", args=(True, profile_prefix, delay_iterations, max_iterations))
        except BaseException:
            self.profile.stop()
            with suppress(WorkerFailed):  # some workers may have started theirs
                self.executor.collective_rpc("profile", args=(False,))
            raise

    def utility_save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        """Have the workers write their shares of the weights. See `Worker.save_sharded_state`."""
        kwargs = {"path": path, "pattern": pattern, "max_size": max_size}
        self.executor.collective_rpc("save_sharded_state", self.config.executor.init_timeout_s, kwargs=kwargs)

    # ---- startup

    def _start_cache(self) -> int:
        started_s = time.perf_counter()
        num_blocks = self._size_cache()
        self.executor.initialize_cache(num_blocks)
        self._lap("kv_cache_and_warm_up", started_s)
        return num_blocks

    def _size_cache(self) -> int:
        cache, block_size = self.config.cache, self.config.cache.block_size
        if cache.num_gpu_blocks_override is not None:
            return cache.num_gpu_blocks_override
        by_worker = zip(self.executor.determine_available_memory(), self.executor.bytes_per_block(), strict=True)
        available, bytes_per_block = min(by_worker, key=lambda sizes: sizes[0] / sizes[1])
        num_blocks = available // bytes_per_block
        longest = self.config.scheduler.max_model_len
        if num_blocks * block_size < longest:
            raise InvalidConfig(
                f"the KV cache would hold {num_blocks * block_size} tokens ({available / 2**20:.1f} MiB at "
                f"{bytes_per_block / block_size:.0f} bytes a token), less than max_model_len={longest}: lower "
                "max_model_len, or raise kv_cache_memory_bytes or gpu_memory_utilization"
            )
        # max_num_seqs requests of max_model_len tokens need no more blocks than this, and each block costs bookkeeping
        most_useful = self.config.scheduler.max_num_seqs * -(-longest // block_size)
        return int(min(num_blocks, most_useful))

    def _lap(self, name: str, started_s: float) -> None:
        self.timings_s[name] = round(time.perf_counter() - started_s, 3)


def _num_turns(config: EngineConfig) -> int:
    """In how many steps decodes take turns: in one for each stage that computes at the same time."""
    return min(config.max_steps_in_flight, config.parallel.pipeline_parallel_size)


def run_loop(core: EngineCore, mailbox: Mailbox) -> None:
    """Run steps while there is work, and sleep while there is none.

    Returns when the mailbox is stopped, or when the rank has joined another group of ranks that share experts. Raises
    the error of a step, or the error passed to `Mailbox.fail()`. The rank can't continue afterwards.
    """
    while not mailbox.stopping:
        commands = mailbox.take(0.0 if core.has_work() else core.idle_wait_s())
        for command in commands:
            apply_command(command, core, mailbox)
        release_prepared(core, mailbox)
        outputs = core.step()
        if outputs is not None:
            mailbox.publish(outputs, core.load())
        elif commands:
            mailbox.note_load(core.load())
        if mailbox.changes and not core.has_work() and make_changes(core, mailbox):
            return


def release_prepared(core: EngineCore, mailbox: Mailbox) -> None:
    """Let requests start whose grammars and adapters are ready. Tells the clients of those that can't start."""
    for seq_id, why in core.release_prepared().items():
        mailbox.refuse(seq_id, why, "failed")


def make_changes(core: EngineCore, mailbox: Mailbox) -> bool:
    """Make the changes that wait in the mailbox. Call this when the rank is at rest.

    Returns: whether the rank has joined another group. Changes after that one still wait then.

    Raises what a worker raised, after the callers have got the error. The rank can't continue afterwards.
    """
    while mailbox.changes:
        command = mailbox.changes.popleft()
        try:
            _make_change(command, core, mailbox)
        except BaseException as error:
            command.reply.set_exception(error)
            raise
        if isinstance(command, Regroup):
            return True
    return False


def _make_change(command: Change, core: EngineCore, mailbox: Mailbox) -> None:
    if isinstance(command, SetActivity):
        core.follow(command.activity, clear_cache=command.clear_cache)
        mailbox.note_load(core.load())
        command.reply.set_result(mailbox.flush())
        return
    if isinstance(command, Regroup):
        core.regroup(command.regrouping, stays=command.stays)
    command.reply.set_result(None)


def apply_command(command: Command, core: EngineCore, mailbox: Mailbox) -> None:
    """Apply a client's command to `core`. Requests that can't be added are refused through `mailbox`."""
    if isinstance(command, Submit):
        for seq_id, reason in command.undecodable:
            if not mailbox.is_forgotten(seq_id):
                mailbox.refuse(seq_id, reason, "failed")
        for request in command.requests:
            if mailbox.is_forgotten(request.seq_id):
                continue
            try:
                core.submit(request)
            except InvalidRequest as error:
                mailbox.refuse(request.seq_id, str(error))
    elif isinstance(command, Abort):
        core.abort(command.seq_ids)
    elif isinstance(command, ForgetClient):
        core.abort_client(command.client)
        mailbox.forget_client(command.client)
    elif isinstance(command, Utility):
        call_utility(core, command)
    elif isinstance(command, StartWave):
        pass  # it is late: the engine has left that group
    else:
        if isinstance(command, Hold):
            core.hold()
        elif isinstance(command, SetActivity) and command.activity.is_paused:
            core.pause()
        mailbox.changes.append(command)


_decode_requests = msgspec.msgpack.Decoder(list[EngineRequest]).decode
_decode_each = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode


def decode_requests(message: bytes) -> tuple[list[EngineRequest], list[tuple[int, str]]]:
    """Decode a client's message: an encoded list of `EngineRequest`.

    Returns: the requests, and (seq_id, reason) of those that can't be decoded.

    Raises:
        msgspec.DecodeError: the message isn't an encoded list, or one of its items doesn't begin with a seq_id.
    """
    try:
        return _decode_requests(message), []
    except msgspec.DecodeError:
        return _decode_one_by_one(_decode_each(message))


def _decode_one_by_one(messages: list[msgspec.Raw]) -> tuple[list[EngineRequest], list[tuple[int, str]]]:
    requests: list[EngineRequest] = []
    undecodable: list[tuple[int, str]] = []
    for message in messages:
        try:
            requests.append(msgspec.msgpack.decode(message, type=EngineRequest))
        except msgspec.DecodeError as error:
            seq_id = msgspec.msgpack.decode(message, type=_Identified).seq_id
            undecodable.append((seq_id, f"the engine can't decode the request: {error}"))
    return requests, undecodable


class _Identified(msgspec.Struct, array_like=True):
    """Decodes only the first field of an encoded `EngineRequest`, its seq_id. Other fields may be invalid."""

    seq_id: int
