"""A running engine with its client, supervisor and control: what `LLM` and `AsyncLLM` have in common."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

# imported before any module that imports Ray, because this import silences Ray's message about missing widgets
from raycore.display.progress_bars import loading_bar
from raycore.system import os, signal, threading, time

# isort: split

from raycore.client.client import EngineClient, make_tokenizer
from raycore.client.engine_facts import EngineFacts
from raycore.client.group import ClientGroup
from raycore.client.request_log import RequestLog
from raycore.client.streams import Streams
from raycore.client.watchers import Watcher
from raycore.cluster.connection import cancelled_at_exit, end_before_ray, is_exiting
from raycore.cluster.engine_start import EngineStart
from raycore.cluster.manager import CoreEngineActorManager
from raycore.cluster.owner import end_with_owner
from raycore.cluster.runtime import RayRuntime
from raycore.cluster.supervisor import Supervisor
from raycore.config import ENGINE_OPTIONS, EngineConfig, changes, non_defaults, resolve
from raycore.config.checks import warn_of_transformers
from raycore.control.calls import REMOTE_CALLS, EngineCalls, EngineParts, check_seconds
from raycore.control.pauses import Pauses
from raycore.control.program import ControlThread
from raycore.control.ranks import rank_statuses
from raycore.display.notebook import engine_html
from raycore.engine.rank_events import EngineLost
from raycore.errors import EngineDeadError
from raycore.messages import EngineInfo
from raycore.metrics.engines import add_engine
from raycore.metrics.periodic import Periodic
from raycore.metrics.ray_export import INTERVAL_S, RayExport
from raycore.metrics.snapshot import Metric, snapshot
from raycore.metrics.stat_loggers import StatLoggers, check_stat_loggers, tell_figures
from raycore.metrics.throughput_log import ThroughputLog
from raycore.metrics.view import MetricsView
from raycore.node.logs import own_level
from raycore.node.own_process import OwnProcess
from raycore.node.signals import cancel_ray_alarm, ending_signals, forget_signals, is_echo
from raycore.node.versions import hardware, versions
from raycore.options.declared import with_options
from raycore.parts.adapters.control import AdapterCalls
from raycore.parts.traces.client.making import make_traces
from raycore.parts.traces.client.traces import Traces
from raycore.parts.weights.cluster import OnStaleRank
from raycore.parts.weights.control.updates import WeightUpdates
from raycore.sampling_params import SamplingParams
from raycore.short_tracebacks import ends_traceback
from raycore.status import EngineStatus, RankStatus, num_serving

if TYPE_CHECKING:
    from types import FrameType

    from ray.util.placement_group import PlacementGroup
    from typing_extensions import Unpack

    from raycore.engine_args import EngineArgs
    from raycore.options.types import EngineOptions

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 2.0
"""How long a shutdown waits for the supervisor's threads to end, after the ranks have ended."""


class RunningEngine(OwnProcess, EngineFacts):
    """Base of `LLM` and `AsyncLLM`: a running engine and its client."""

    _stat_loggers: StatLoggers | None = None
    _exports_metrics: bool = True
    """Whether Ray exports the engine's metrics."""

    @with_options(ENGINE_OPTIONS)
    @ends_traceback
    def __init__(
        self,
        model: str | os.PathLike[str],
        tokenizer: str | os.PathLike[str] | None = None,
        *,
        placement_groups: Sequence[PlacementGroup] | None = None,
        use_tqdm_on_load: bool = True,
        _is_wanted: Callable[[], bool] = lambda: True,
        _start: EngineStart | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        """Start the engine and wait until it can serve.

        Args:
            model: directory of a Hugging Face checkpoint, or its name on the hub if it is in the cache.
            tokenizer: the same for the tokenizer. None: that of `model`.
            placement_groups: one per data-parallel rank, created by the caller. Ranks with the same group take its
                bundles one after the other, or those of `placement_bundle_indices`. raycore doesn't remove them. None:
                raycore creates placement groups, and removes them at shutdown, unless the program has bundles or GPUs
                for the ranks (docs/placement.md).
            use_tqdm_on_load: show a progress bar if reading the weights takes long.
            options: docs/options.md lists them with types, ranges and defaults. Other options of vLLM are accepted
                if their values have no effect.

        Raises:
            InvalidConfig, InvalidCheckpoint: an option or the checkpoint is unusable; the message names it.
            PlacementShortage: the cluster cannot fit the ranks. Raised at once if the ranks don't even fit the idle
                cluster, otherwise after `placement_timeout_s`. If `wait_for_nodes_s` is set, raised after that time.
            InitializationError: a rank failed to start, or Ray can't be used. The message begins with the first error.
        """
        begun_s = time.time()
        self.config: EngineConfig = _resolve(model, tokenizer, options)
        self.traces: Traces = make_traces(self.config.traces)
        """The spans of requests in this process, and of the ranks' starts."""
        self._asked = self.config
        warn_of_transformers(self.config.model.spec, options.get("model_impl"))
        if logger.isEnabledFor(logging.INFO):
            chosen = [f"model={self.config.model.model!r}", *non_defaults(options)]
            logger.info("%s, on %s: %s", versions(), hardware(), ", ".join(chosen))
        self._brought_groups = None if placement_groups is None else list(placement_groups)
        tokens = make_tokenizer(self.config.model)
        manager = CoreEngineActorManager(self.config, placement_groups, runtime=RayRuntime())
        self._client = EngineClient(self.config, tokens)
        self._streams = Streams(self._client)
        self.clients = ClientGroup(self._client)
        """All clients of the engine. API server processes add theirs."""
        self.traces.watch(self, self.config.model.model)
        self.clients.on_rank_up = self.traces.rank_up
        self._supervisor = Supervisor(manager, self.clients, self.config)
        self._client.on_broken_stream = self._supervisor.report
        self._manager = manager
        pauses = Pauses(manager, self._supervisor, self.clients, self.config.executor.init_timeout_s)
        adapters = AdapterCalls(manager, self._supervisor, self._client, self.config)
        weights = WeightUpdates(manager, self._supervisor, self.clients, pauses, self.config)
        self._parts = EngineParts(self._client, self.clients, self._supervisor, pauses, adapters, weights, self.config)
        self.name: str = self.config.engine_name or manager.engine_id
        """`raycore status` and `raycore scale` find the engine by this name, from any node of its Ray cluster."""
        self._read_status = partial(
            _read_status, self.name, self.config.model.model, manager, self._supervisor, self.clients
        )
        self._read_metrics = partial(_read_metrics, manager, self._supervisor, self.clients)
        self._throughput = ThroughputLog(self._read_metrics)
        calls = EngineCalls(self._parts)
        remote_calls = {name: getattr(calls, name) for name in REMOTE_CALLS}
        self._control = ControlThread(self.name, self._read_status, remote_calls)
        export = Periodic("raycore-ray-metrics", INTERVAL_S, RayExport(self.name, self._read_metrics).report)
        self._finalizer = weakref.finalize(
            *(self, _stop, self._control, export, self._client, self.clients, self._supervisor, weights, manager),
            self.traces.stop,
        )
        self._finalizer.atexit = False  # until the end of the start, which an exit cancels
        # shuts down on its own thread: Ctrl-C ends only the caller's wait, and never leaves the engine half shut down
        self._stopper = threading.Thread(target=self._finalizer, name="raycore-shutdown")
        self._ending = threading.Lock()
        try:
            with cancelled_at_exit(manager.cancel), loading_bar(use_tqdm_on_load) as bar:
                claim = self._control.claim if self.config.engine_name is not None else None
                show = bar.show if use_tqdm_on_load else None
                if _start is not None:
                    show = _start.watch(manager, self.config.parallel.data_parallel_size, show)
                infos = manager.start(show, _is_wanted, claim)
            self.config = self.config.with_max_model_len(min(info.max_model_len for info in infos))
            self.traces.engine_started(begun_s, infos)
            self._finalizer.atexit = True
            end_before_ray(self._finalizer)
            end_with_owner(self._finalizer)
            self._supervisor.start()
            self._control.start()
            if self._exports_metrics:
                export.start()
            status = f"raycore status --address {manager.address} --name {self.name}"
            logger.info("engine %s is up in the Ray cluster at %s: `%s` shows it", self.name, manager.address, status)
            for info in infos:
                logger.info(
                    "dp_rank %d is up: backend %s, dtype %s, KV cache of %d tokens (%d blocks of %d), "
                    "start-up times in s %s",
                    *(info.dp_rank, ", ".join(info.backends), info.dtype, info.num_kv_tokens, info.num_blocks),
                    *(info.block_size, info.timings_s),
                )
            add_engine(self)
        except BaseException:  # such as an interrupt after the ranks have started
            self.shutdown()
            raise

    @classmethod
    @ends_traceback
    def from_engine_args(
        cls: type[_EngineT],
        engine_args: EngineArgs,
        start_engine_loop: bool = True,
        usage_context: object = None,
        stat_loggers: Sequence[object] | None = None,
    ) -> _EngineT:
        """Start an engine with these arguments.

        Args:
            start_engine_loop: no effect, as `usage_context`.
            stat_loggers: classes whose objects get the figures of this process's requests, as vLLM's: subclasses of
                `raycore.metrics.stat_loggers.StatLoggerBase`.
        """
        check_stat_loggers(stat_loggers or ())
        options = dict(vars(engine_args))
        logs_requests = options.pop("enable_log_requests", False)
        engine = cls(**options)
        if logs_requests:
            engine.watch(RequestLog(engine.get_tokenizer()))
        if stat_loggers:
            try:
                ranks = len(engine.engine_infos), engine._manager.first_rank
                engine._stat_loggers = tell_figures(engine._client, stat_loggers, engine.config, *ranks)
            except BaseException:  # the classes are the user's
                engine.shutdown()
                raise
        return engine

    @classmethod
    @with_options(ENGINE_OPTIONS)
    @ends_traceback
    def get_or_create(
        cls: type[_EngineT],
        model: str | os.PathLike[str],
        tokenizer: str | os.PathLike[str] | None = None,
        *,
        placement_groups: Sequence[PlacementGroup] | None = None,
        use_tqdm_on_load: bool = True,
        **options: Unpack[EngineOptions],
    ) -> _EngineT:
        """Return the engine of the previous call if its configuration is the same, else replace it with a new one.

        Meant for notebook cells, which are run repeatedly. The program keeps one such engine per `engine_name` (None
        counts as a name). The engine runs until `shutdown()`, even if no variable refers to it any more. Calling this
        on the other class, `LLM` or `AsyncLLM`, counts as a different configuration.

        Configurations are compared after defaults have been filled in, so passing a default value is no change. The
        engine keeps the number of ranks that `scale()` gave it. Changes of the weight files are not noticed.

        The arguments and errors are those of the class. The old engine is shut down before the new one starts, so that
        their memory is never needed at the same time. Requests of the old engine raise EngineDeadError with that
        reason. If an option or the checkpoint is invalid (InvalidConfig, InvalidCheckpoint), the old engine keeps
        running. If the new engine fails to start, there is no engine.
        """
        config = _resolve(model, tokenizer, options)
        groups = None if placement_groups is None else list(placement_groups)
        with _keeping:
            old = _kept.get(config.engine_name)
            was_serving = old is not None and old.unavailable_reason is None
            if old is not None:
                changed = old._differences(cls, config, groups)
                if was_serving and not changed and isinstance(old, cls):
                    old._warn_if_paused()
                    return old
                old._make_room(changed)
            try:
                engine = cls(model, tokenizer, placement_groups=groups, use_tqdm_on_load=use_tqdm_on_load, **options)
            except BaseException:
                if was_serving:
                    logger.warning(
                        "no engine is running now: the previous one was shut down to make room for this one, which "
                        "didn't start"
                    )
                raise
            _kept[config.engine_name] = engine
            return engine

    def __repr__(self) -> str:
        status = self._read_status()
        state = self.unavailable_reason or num_serving(status)
        return f"<{type(self).__name__} {self.name}, model {status.model}: {state}>"

    def _repr_html_(self) -> str:
        """HTML for notebooks: a table of the ranks, as last known."""
        return engine_html(type(self).__name__, self._read_status(), self.unavailable_reason)

    @property
    def engine_infos(self) -> list[EngineInfo]:
        """What each rank reported when it started, in rank order. Leaves out ranks that are still starting."""
        return self._manager.infos

    @property
    def ranks(self) -> list[RankStatus]:
        """The last known status of each rank, in rank order. Sends nothing to the ranks. Empty after `shutdown()`."""
        return self._read_status().ranks

    def read_metrics(self) -> MetricsView:
        """The engine's metrics, as last known to this process. `/metrics` and the throughput log show the same."""
        return self._read_metrics()

    def get_metrics(self) -> list[Metric]:
        """The engine's metrics, as `Counter`, `Gauge`, `Histogram` and `Vector` (`raycore.metrics.snapshot`)."""
        return snapshot(self._read_metrics(), self.config.model.model)

    def do_log_stats(self) -> None:
        """Log the throughput of each rank that had work since the previous call, at level INFO. Has `log()` of the
        objects of `stat_loggers` called soon, too."""
        self._throughput.report()
        if self._stat_loggers is not None:
            self._stat_loggers.log()

    def watch(self, watcher: Watcher) -> None:
        """Have somebody see the requests of this program that come from now on: see `Watcher`."""
        self._client.watchers.add(watcher)

    def trace_requests(self) -> None:
        """Record the timings of all requests submitted from now on, in their outputs' `trace`."""
        self._client.trace_requests()

    @property
    def on_stale_rank(self) -> OnStaleRank:
        """Called with a dp_rank and the reason if a rank can't have the engine's weights: it is out of service until an
        update brings all weights. Must return quickly."""
        return self._manager.weights.on_stale_rank

    @on_stale_rank.setter
    def on_stale_rank(self, told: OnStaleRank) -> None:
        self._manager.weights.on_stale_rank = told

    def report(self, dp_rank: int, reason: str) -> None:
        """Have a misbehaving rank killed and replaced. The log and errors give `reason` as the cause."""
        self._supervisor.report(dp_rank, reason)

    def wait_for_completion_or_failure(self, timeout_s: float | None = None) -> bool:
        """Block until the engine ends, for programs that only serve. Returns True after a shutdown, or False after
        `timeout_s` seconds.

        Raises:
            EngineDeadError: the engine failed; the message begins with the root cause.
        """
        cause = self._supervisor.wait(timeout_s)
        if cause is not None:
            raise cause.with_traceback(None)  # other threads may raise the same error
        return self._supervisor.has_ended

    def get_default_sampling_params(self, **overrides: Any) -> SamplingParams:
        """The defaults of `SamplingParams`, overridden by generation_config.json, overridden by `overrides`."""
        return SamplingParams(**self.default_sampling_params | overrides)

    @property
    def num_unfinished_requests(self) -> int:
        """Number of unfinished requests, of all clients of the engine."""
        return self.clients.num_unfinished_requests

    @property
    def num_queued_tokens(self) -> int:
        """Number of tokens of the prompts of this program's requests that have no output yet. Does no I/O."""
        return self._client.num_queued_tokens

    def shutdown(self, drain_timeout_s: float = 0.0, timeout: float | None = None) -> None:
        """Stop all processes of the engine and remove the placement groups that raycore created. Idempotent.

        With `drain_timeout_s`, unfinished requests first get that many seconds to finish, and new ones are refused.
        After that, the rest end with their output so far and the finish reason `abort`. Without `drain_timeout_s`,
        unfinished requests raise EngineDeadError.

        Args:
            timeout: seconds that ranks have to stop before they are killed. None: the option `shutdown_timeout_s`.

        Raises:
            InvalidInput: `timeout` is negative or far too large. The engine goes on.
        """
        check_seconds("timeout", timeout)
        cancel_ray_alarm()
        if drain_timeout_s > 0 and self._finalizer.alive:
            self.clients.drain(drain_timeout_s)
            self.clients.abort_all()
        with self._ending:
            if self._stopper.ident is None:
                if timeout is not None:
                    self._manager.stop_timeout_s = timeout
                self._stopper.start()
        self._stopper.join()

    @contextmanager
    def draining_on_signals(self, drain_timeout_s: float | None = None) -> Generator[list[int], None, None]:
        """While the block runs, SIGTERM, SIGINT and SIGHUP drain the engine instead of interrupting the block.

        After the first signal, new requests are refused, and unfinished ones get `drain_timeout_s` seconds to finish
        (None: the option `drain_timeout_s`). After that time, or at a second signal, unfinished requests end with their
        output so far and the finish reason `abort`.

        A signal within half a second of the first one is ignored, because `timeout`, for example, signals a process and
        then its process group. A SIGHUP after the first signal is always ignored. If the program ignores SIGHUP, as
        under `nohup`, it goes on doing so.

        Call this on the main thread of a program that serves or runs a batch. `ray job stop` kills a program 3 seconds
        after its signal, unless RAY_JOB_STOP_WAIT_TIME_S sets another time.

        Yields: a list of the signals received so far, without ignored ones. It grows with each signal.
        """
        timeout_s = self.config.recovery.drain_timeout_s if drain_timeout_s is None else drain_timeout_s
        came: list[int] = []

        def drain() -> None:
            if not self.clients.drain(timeout_s):
                self.clients.abort_all()

        def on_signal(number: int, frame: FrameType | None) -> None:
            if os.getpid() != process:  # a forked child, which has no engine
                signal.signal(number, before[number])
                os.kill(os.getpid(), number)
                return
            if is_echo(number):
                return
            came.append(number)
            # on another thread: draining and aborting take locks that the interrupted main thread may hold
            work = drain if len(came) == 1 else self.clients.abort_all
            threading.Thread(target=work, name="raycore-drain", daemon=True).start()

        forget_signals()
        process = os.getpid()
        before = {number: signal.signal(number, on_signal) for number in ending_signals()}
        try:
            yield came
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _disown(self) -> None:
        if hasattr(self, "_finalizer"):
            self._finalizer.detach()

    def _differences(
        self, cls: type[RunningEngine], config: EngineConfig, placement_groups: list[PlacementGroup] | None
    ) -> list[str]:
        """How this engine differs from one of class `cls` with these arguments, as texts. Empty if it doesn't."""
        found = changes(self._asked, config)
        if type(self) is not cls:
            found.insert(0, f"{cls.__name__}, was {type(self).__name__}")
        if placement_groups != self._brought_groups:
            found.append("other placement_groups")
        return found

    def _warn_if_paused(self) -> None:
        activity = self._manager.desired.now.activity
        if activity.is_paused:
            wake = (
                "asleep: requests wait until wake_up()"
                if activity.asleep
                else "paused: requests wait until resume_generation()"
            )
            logger.warning("the engine that get_or_create() returned is %s", wake)

    def _make_room(self, changed: Sequence[str]) -> None:
        """Shut this engine down, because another one replaces it."""
        reason = f"the engine was shut down: get_or_create() replaced it with another one ({'; '.join(changed)})"
        logger.info("%s", reason)
        self._client.close(EngineDeadError(reason))
        self.shutdown()


_EngineT = TypeVar("_EngineT", bound=RunningEngine)

_kept: dict[str | None, RunningEngine] = {}
"""The engine that `get_or_create()` returned last for each engine name."""

_keeping = threading.Lock()


def _renew_lock() -> None:
    global _keeping
    _keeping = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)  # another thread of the parent may hold it


def _resolve(
    model: str | os.PathLike[str], tokenizer: str | os.PathLike[str] | None, options: EngineOptions
) -> EngineConfig:
    config = resolve(model, tokenizer, **options)
    if config.kv_transfer_config is not None and config.kv_transfer_config.is_own:
        from raycore.parts.transfers.connectors.connector import connector_class  # imported lazily: few engines need it

        connector_class(config).check(config)
    return msgspec.structs.replace(config, log_level=own_level())


def _read_status(
    name: str, model: str, manager: CoreEngineActorManager, supervisor: Supervisor, clients: ClientGroup
) -> EngineStatus:
    cause = supervisor.wait(0.0)
    return EngineStatus(
        name,
        model,
        rank_statuses(manager, supervisor, clients),
        failure=None if cause is None else str(cause),
        weight_version=manager.weights.latest.version.name,
        owner=manager.owner,
    )


def _read_metrics(manager: CoreEngineActorManager, supervisor: Supervisor, clients: ClientGroup) -> MetricsView:
    view = MetricsView(
        rank_statuses(manager, supervisor, clients), clients.counts(), manager.infos, clients.num_waiting_for_rank
    )
    return view.numbered_from(manager.first_rank)


def _stop(
    control: ControlThread,
    export: Periodic,
    client: EngineClient,
    clients: ClientGroup,
    supervisor: Supervisor,
    weights: WeightUpdates,
    manager: CoreEngineActorManager,
    stop_traces: Callable[[], None],
) -> None:
    export.stop()
    control.stop()
    supervisor.stop()
    weights.stop()
    if is_exiting():
        client.abandon()
    else:
        clients.on_rank_event(EngineLost(EngineDeadError("the engine was shut down")))
    control.join()
    manager.stop_ranks()
    client.join(STOP_TIMEOUT_S)  # if one of the client's threads used Ray after Ray's end, that would end the program
    manager.shutdown()
    supervisor.join(STOP_TIMEOUT_S)
    stop_traces()
