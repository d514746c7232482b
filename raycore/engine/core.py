"""The engine of one data-parallel rank: schedules steps, executes them, and updates requests from the results.

`EngineCore` connects a scheduler to an executor. What isn't part of a step is in collaborators: memory that sleeps
(`rank_memory`), and what clients call by name (`utilities`). What else an engine can do, such as changing weights or
adapters, is in parts (`part`). `loop` and `lockstep` run it. This module imports neither Ray nor torch.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from raycore.activity import Activity
from raycore.cache_layout import KVCacheConfig
from raycore.config import EngineConfig
from raycore.engine.cache_size import choose_cache
from raycore.engine.engine_profile import EngineProfile
from raycore.engine.failed_step import describe_failed_step
from raycore.engine.masked_steps import MaskedSteps
from raycore.engine.part import EngineHooks, Prepared
from raycore.engine.parts import make_parts, make_shared, start_workers
from raycore.engine.progress import LoopProgress
from raycore.engine.rank_memory import RankMemory
from raycore.engine.scheduling import load_scheduler_for, make_scheduler
from raycore.engine.utilities import Utilities
from raycore.executor.base import Executor
from raycore.messages import FIRST_WEIGHTS, EngineRequest, LoadView, StartPhase, StepPlan, StepResult
from raycore.rpc.pending import Pending
from raycore.rpc.start_phases import phase
from raycore.scheduler.outputs import StepOutputs
from raycore.system import time
from raycore.worker.rank import Regrouping

if TYPE_CHECKING:
    from raycore.kvcache.cache_log import CacheLog

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 1.0
"""Maximum time in seconds that an idle loop sleeps. A command or a failure wakes the loop at once."""
_PREPARING_WAIT_S = 0.002
"""Maximum time in seconds that the loop sleeps while requests are prepared, and no other request has work."""


_RECENT = 1 / 16
"""The weight of the latest step in the mean time of steps that only decode."""


class _Step(NamedTuple):
    """A step in flight."""

    plan: StepPlan | None
    """None for a dummy step."""
    pending: Pending[StepResult]
    planned_s: float


class EngineCore:
    """The scheduler and the workers of one data-parallel rank."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        rendezvous: str | None = None,
        name: str = "engine",
        num_blocks: int | None = None,
        dp_rank: int = 0,
    ) -> None:
        """Start the workers, choose the size of the KV cache, and allocate the cache. If that fails, stop the workers.

        Args:
            rendezvous: the address `tcp://host:port` at which the workers of ranks that share experts connect to each
                other; None if ranks share no experts.
            name: the engine's name in the names of profiles' files.
            dp_rank: the rank's number.
            num_blocks: the blocks of the KV cache of ranks that already run, which this new one will join. Its workers
                then load and allocate nothing, and the engine pauses until `regroup()`. None: the engine is complete.

        Raises:
            InitializationError: a worker failed to start.
            InvalidConfig: the free memory can't hold one request of `max_model_len` tokens, or `scheduler_cls` can't be
                imported.
        """
        self.config = config
        self.executor = executor
        self.phases: list[StartPhase] = []
        """Of the start, the first one first."""
        is_new = num_blocks is not None
        try:
            scheduler_class = load_scheduler_for(config)  # fails before weights are loaded
            with phase("workers and weights", self.phases):
                identity = start_workers(config, executor, rendezvous, is_new=is_new)
            self.cache = self._start_cache() if num_blocks is None else choose_cache(config, executor, num_blocks)
            config = self.config = config.with_max_model_len(self.cache.layout.limits.max_model_len)
            shared = make_shared(config, self.cache, executor, dp_rank, is_new=is_new)
        except BaseException:
            executor.shutdown()
            raise
        self.scheduler = make_scheduler(scheduler_class, config, self.cache, shared)
        self.progress = LoopProgress(executor.workers_answer)
        self.version = FIRST_WEIGHTS
        """Of the weights, as outputs say. Who changes them sets it."""
        self.generation = 0
        """The number of the present group of ranks that share experts, among all that there have been."""
        self.parts = list(make_parts(self, shared, identity, is_new=is_new))
        """In the order in which their hooks are called."""
        self._hooks = EngineHooks(self.parts)
        self.memory = RankMemory(executor, self.scheduler, self._hooks, self.cache, config.executor.init_timeout_s)
        self.profile = EngineProfile(name, executor)
        self.profile.add(self, step="step", lockstep_step="step")
        self.profile.add(self.scheduler, schedule="schedule", update="update")
        num_blocks = self.cache.num_blocks
        self.utilities = Utilities(config, executor, self.scheduler, self.profile, num_blocks, self.load, self.parts)
        self._masked = MaskedSteps(executor, shared.masks)
        self._in_flight: deque[_Step] = deque()
        """Oldest first."""
        self._arrived_s: dict[int, float] = {}
        """Arrival times by seq_id, of requests whose first step has no result yet."""
        self._is_paused = False
        """Whether no steps are planned."""
        self._awaits_group = is_new
        """Whether none are planned, because the group of ranks that share experts is about to change."""
        self._plan: StepPlan | None = None
        """The plan of the current step, which the log describes if the step fails. None before the plan is made."""
        self._finished_s = 0.0
        """When the last result came."""
        self._decode_s = 0.0
        """As in `LoadView`."""

    # ---- requests

    def submit(self, request: EngineRequest, arrived_s: float | None = None) -> list[str]:
        """Add a request. `arrived_s`: when the engine got it, on the monotonic clock. None: now.

        Returns: the identifiers of those of its features whose data the client has to send, too. If there are any, the
            request wasn't added.

        Raises:
            InvalidRequest: the request is invalid or could never run. Other requests are not affected.
        """
        missing = [identifier for complete in self._hooks.complete for identifier in complete(request)]
        if missing:
            return missing
        waits = [must_wait(request) for must_wait in self._hooks.must_wait]  # each may refuse it
        self.scheduler.submit(request, is_held=any(waits))
        for added in self._hooks.added:
            added(request)
        self._arrived_s[request.seq_id] = time.monotonic() if arrived_s is None else arrived_s
        return []

    def abort(self, seq_ids: list[int]) -> None:
        """Abort requests. They produce no more outputs."""
        self.scheduler.abort(seq_ids)
        for seq_id in seq_ids:
            self._drop(seq_id)
            self._arrived_s.pop(seq_id, None)

    def abort_client(self, client: int) -> None:
        """Abort all requests of the client with the index `client`. They produce no more outputs."""
        self.abort(self.scheduler.seq_ids_of(client))

    def release_prepared(self) -> dict[int, str]:
        """Let the scheduler start requests that parts kept back, and that none keeps back any more.

        Call this before each step. Returns why requests were dropped, by seq_id, because a part can't prepare them.
        """
        prepared = [done for take_prepared in self._hooks.take_prepared if any(done := take_prepared())]
        if not prepared:
            return {}
        failed = dict(each for done in prepared for each in done.failed)
        self.scheduler.release(self._released(prepared, failed))
        self.abort(list(failed))
        return failed

    def _released(self, prepared: list[Prepared], failed: dict[int, str]) -> list[int]:
        """Return the requests that may start, without those that have failed or wait for another part."""
        seq_ids = dict.fromkeys(seq_id for done in prepared for seq_id in done.seq_ids)
        return [
            seq_id
            for seq_id in seq_ids
            if seq_id not in failed and not any(keeps_back(seq_id) for keeps_back in self._hooks.keeps_back)
        ]

    def _drop(self, seq_id: int) -> None:
        for dropped in self._hooks.dropped:
            dropped(seq_id)

    # ---- steps

    def step(self) -> StepOutputs | None:
        """Start the next step if there is one. Then wait for the oldest step in flight, and return its outputs.

        Returns None without waiting if no step is in flight, or if a step was started and another may be started before
        its result arrives.
        """
        self._plan = None
        try:
            with self.progress.step():
                started = self._start_step() if self._has_room() else None
                if started is not None:
                    self._in_flight.append(started)
                    if self._has_room():
                        return None  # the workers are busy: plan another step before waiting for a result
                outputs = self._finish_step(self._in_flight.popleft())[0] if self._in_flight else None
                self._between_steps()
                return outputs
        except Exception as error:
            self._report(error)
            raise

    def lockstep_step(
        self, *, may_start: bool = True, timeout_s: float | None = None
    ) -> tuple[StepOutputs | None, bool | None]:
        """Start the next step of a wave (see `waves`) if one may be started. Then wait for the oldest step in flight.

        If this engine has nothing to compute, it starts a dummy step, in which it has no token: engines that share
        experts can only run a step all together.

        Args:
            may_start: if False, at least one step must be in flight.
            timeout_s: how long to wait for the other engines, in seconds; None: `execute_timeout_s`.

        Returns: the finished step's outputs (None for a dummy step), and whether any of the engines that share experts
        had a token to compute in it. (None, None) without waiting if another step may be started first.

        Raises:
            RpcTimeout: the other engines didn't take part in time.
        """
        self._plan = None
        try:
            with self.progress.step():
                if may_start:
                    self._in_flight.append(self._start_step() or self._start_dummy_step())
                self._between_steps()
                if may_start and self._has_room():
                    return None, None
                return self._finish_step(self._in_flight.popleft(), timeout_s)
        except Exception as error:
            self._report(error)
            raise

    @property
    def num_in_flight(self) -> int:
        """How many steps were started whose results haven't been taken."""
        return len(self._in_flight)

    def _has_room(self) -> bool:
        """Whether another step may be started before the result of one arrives."""
        return len(self._in_flight) < self.executor.max_concurrent_batches and not self._masked.is_deferred

    def _start_step(self) -> _Step | None:
        """Schedule a step, and have the workers run it. Returns None if there is nothing to compute."""
        planned_s = time.monotonic()
        plan = self._plan = None if self._is_at_rest else self.scheduler.schedule()
        if plan is None:
            return None
        for step_planned in self._hooks.step_planned:
            step_planned(plan, planned_s)
        return _Step(plan, (self._masked if plan.masked else self.executor).execute(plan), planned_s)

    def _start_dummy_step(self) -> _Step:
        return _Step(None, self.executor.execute_dummy_batch(), time.monotonic())

    def _finish_step(self, step: _Step, timeout_s: float | None = None) -> tuple[StepOutputs | None, bool]:
        """Wait for a step's result, at most `timeout_s` (`execute_timeout_s`), and update the requests from it.

        Returns: the step's outputs (None for a dummy step), and whether any of the engines that share experts had a
        token to compute.
        """
        self._plan = step.plan
        result = step.pending.result(self.config.executor.execute_timeout_s if timeout_s is None else timeout_s)
        if step.plan is None:
            return None, result.is_anyone_busy
        finished_s = time.monotonic()
        if step.plan.only_decodes:
            own_s = finished_s - max(step.planned_s, self._finished_s)  # workers compute one step at a time
            self._decode_s += (own_s - self._decode_s) * (_RECENT if self._decode_s else 1.0)
        self._finished_s = finished_s
        outputs = self.scheduler.update(step.plan, result)
        outputs.duration_s, outputs.version = time.monotonic() - step.planned_s, self.version
        self._note(step.plan, step.planned_s, outputs)
        self._masked.go_on()
        return outputs, result.is_anyone_busy

    def _note(self, plan: StepPlan, planned_s: float, outputs: StepOutputs) -> None:
        """Tell the parts what a step has done, and complete its outputs."""
        for step_done in self._hooks.step_done:
            step_done(plan, outputs)
        outputs.queued = [(seq_id, planned_s - self._arrived_s.pop(seq_id)) for seq_id, _ in outputs.started]
        for end in outputs.finished:
            self._drop(end.seq_id)
            self._arrived_s.pop(end.seq_id, None)  # it may have failed before its first step

    def _between_steps(self) -> None:
        for between_steps in self._hooks.between_steps:
            between_steps()

    def _report(self, error: Exception) -> None:
        """Log the engine's state when a step has failed."""
        seq_ids = [] if self._plan is None else self.scheduler.seq_ids_in_flight(self._plan.step)
        logger.error("%s", describe_failed_step(error, self._plan, seq_ids, self.load(), self.config))

    # ---- what the loop and the supervisor ask

    def has_work(self) -> bool:
        """Whether a step is in flight, or a request waits or runs and the rank is not paused.

        Requests that wait for grammars don't count.
        """
        return bool(self._in_flight) or (not self._is_at_rest and self.scheduler.has_work())

    def wait_s(self) -> float:
        """The maximum time in seconds that the loop may sleep before the next step. A command wakes it."""
        if not self.has_work():
            for idle in self._hooks.idle:
                idle()
            return self.idle_wait_s()
        return 0.0 if self._in_flight else max((pause_s() for pause_s in self._hooks.pause_s), default=0.0)

    def idle_wait_s(self) -> float:
        """The maximum time in seconds that the loop may sleep without work. Shorter while requests are prepared."""
        is_preparing = any(is_preparing() for is_preparing in self._hooks.is_preparing)
        return _PREPARING_WAIT_S if is_preparing else IDLE_WAIT_S

    def load(self) -> LoadView:
        """The numbers of waiting and running requests, the fraction of the KV cache in use, counters, and adapters."""
        numbers: dict[str, Any] = {"decode_s": self._decode_s}
        for load in self._hooks.load:
            numbers |= load()
        return msgspec.structs.replace(self.scheduler.load(), **numbers)

    def step_age_s(self) -> float:
        """For how long this rank has made no progress, in seconds; 0 at rest. Any thread may ask."""
        return self.progress.age_s()

    @property
    def is_in_lockstep(self) -> bool:
        """Whether this rank runs every step together with others."""
        return self.config.parallel.is_lockstep and not self._awaits_group

    @property
    def _is_at_rest(self) -> bool:
        """Whether no steps are planned."""
        return self._is_paused or self._awaits_group

    # ---- changes between steps

    def pause(self) -> None:
        """Plan no more steps. `set_activity()` completes the pause when no step is in flight."""
        self._is_paused = True

    def set_activity(self, activity: Activity, *, clear_cache: bool = False) -> None:
        """Change what this rank does. Requests stay; if their keys and values are dropped, they are computed again.

        Blocks while memory is given up or allocated again, and while weights are loaded. If ranks share experts, they
        must do this at the same time.

        Args:
            activity: what the rank does from now on. If it is a pause or a sleep, no step may be in flight.
            clear_cache: drop the keys and values of all requests, and the prefix cache.

        Raises: what a worker raised. The rank can't continue afterwards.
        """
        assert not (activity.is_paused and self._in_flight), "finish the steps in flight first"
        if clear_cache:
            self.scheduler.reset_prefix_cache(reset_running_requests=True)
        with self.progress.long_work():
            self.memory.set_activity(activity)
        self._is_paused = activity.is_paused

    def pause_for_regrouping(self) -> None:
        """Plan no more steps until `regroup()`. Requests stay."""
        self._awaits_group = True

    def regroup(self, regrouping: Regrouping, *, stays: bool) -> None:
        """Join another group of ranks that share experts, with the same requests, and go on.

        All ranks that stay, come or leave must do this at the same time, while they are paused for it.

        Args:
            stays: whether this rank belongs to the new group. One that doesn't stays paused.

        Raises: what a worker raised. The rank can't continue afterwards.
        """
        assert self._awaits_group, "pause_for_regrouping() comes first"
        assert not self._in_flight, "finish the steps in flight first"
        self.config = self.config.with_num_ranks(regrouping.num_ranks)
        for regroup in self._hooks.regroup:
            regroup(regrouping, stays=stays)
        self.generation, self._awaits_group = regrouping.generation, not stays

    # ---- start and end

    def _start_cache(self) -> KVCacheConfig:
        with phase("kv cache and warm up", self.phases):
            cache = choose_cache(self.config, self.executor)
            self.executor.initialize_cache(cache)
        return cache

    @property
    def kv_addresses(self) -> list[str]:
        """How workers of other ranks reach this one's, to read blocks. Empty: they don't."""
        return [address for part in self.parts for address in part.addresses()]

    @property
    def cache_log(self) -> CacheLog | None:
        """What clients are told of the prefix cache. None: nothing."""
        return next((log for part in self.parts for log in part.cache_logs()), None)

    @property
    def timings_s(self) -> dict[str, float]:
        """How long each phase of the start took, in seconds."""
        return {each.name.replace(" ", "_"): round(each.duration_s, 3) for each in self.phases}

    def shutdown(self) -> None:
        """Stop the workers, and write the profile that is running, if any. Idempotent."""
        try:
            self.profile.stop()
        except OSError:
            logger.exception("the engine's profile is lost")
        for part in self.parts:
            part.close()
        self.executor.shutdown()
