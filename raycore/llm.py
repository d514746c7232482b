"""The public faces of an engine: `LLM` blocks, `AsyncLLM` streams."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
import uuid
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from raycore.client.client import EngineClient
from raycore.client.group import ClientGroup
from raycore.client.inputs import ParsedPrompt, Prompt, as_prompt_list, parse_prompts
from raycore.client.streams import Streams
from raycore.client.updates import Update, coalescing_s
from raycore.cluster.local import cancelled_at_exit, end_before_ray, is_exiting
from raycore.cluster.manager import CoreEngineActorManager
from raycore.cluster.owner import end_with_task
from raycore.cluster.supervisor import Supervisor
from raycore.config import ENGINE_OPTIONS, EngineConfig, changes, resolve
from raycore.control.program import ControlThread
from raycore.control.ranks import rank_statuses
from raycore.display.notebook import engine_html
from raycore.display.progress_bars import BAR_S, RequestBar, loading_bar, request_bar
from raycore.engine.rank_events import EngineLost
from raycore.errors import EngineDeadError, InvalidRequest, RequestFailed
from raycore.logs import own_level
from raycore.messages import EngineInfo
from raycore.metrics.periodic import Periodic
from raycore.metrics.ray_export import INTERVAL_S, RayExport
from raycore.metrics.view import MetricsView
from raycore.node.signals import ending_signals, forget_signals, is_echo
from raycore.options import with_options
from raycore.outputs import RequestOutput
from raycore.sampling_params import SamplingParams
from raycore.status import EngineStatus, RankStatus, num_serving
from raycore.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from types import FrameType, TracebackType

    from ray.util.placement_group import PlacementGroup
    from typing_extensions import Unpack

    from raycore.option_types import EngineOptions

logger = logging.getLogger(__name__)

RPC_GRACE_S = 5.0
"""Ranks find out first that their workers are late, and say which."""
WAIT_S = 1.0
"""A blocked caller looks up this often; results and failures wake it at once."""


STOP_TIMEOUT_S = 2.0
"""The threads that watch the ranks have nothing left to wait for by then."""

Messages = Sequence[dict[str, Any]]


class _Engine:
    """What `LLM` and `AsyncLLM` share: a running engine and the client that talks to it."""

    @with_options(ENGINE_OPTIONS)
    def __init__(
        self,
        model: str | os.PathLike[str],
        tokenizer: str | os.PathLike[str] | None = None,
        *,
        placement_groups: Sequence[PlacementGroup] | None = None,
        use_tqdm_on_load: bool = True,
        _is_wanted: Callable[[], bool] = lambda: True,
        **options: Unpack[EngineOptions],
    ) -> None:
        """Start the engine and wait until it can serve.

        Args:
            model: a Hugging Face checkpoint's directory.
            tokenizer: the tokenizer's directory; None is the model's.
            placement_groups: one for each data-parallel rank, made by the caller and left in place. None: raycore
                makes its own and removes them.
            use_tqdm_on_load: show a progress bar while weights are read, if that takes long.
            options: docs/options.md lists them, with types, ranges and defaults. vLLM's others are taken with values
                that ask for nothing.

        Raises:
            InvalidConfig, InvalidCheckpoint: an option or the checkpoint can't work; the message names it.
            PlacementShortage: the cluster can't hold the shape: at once, or after `wait_for_nodes_s`.
            InitializationError: a rank didn't come up; the message begins with that rank's own error.
        """
        self.config: EngineConfig = _resolve(model, tokenizer, options)
        self._brought_groups = None if placement_groups is None else list(placement_groups)
        tokens = Tokenizer.from_dir(self.config.model.tokenizer)
        manager = CoreEngineActorManager(self.config, placement_groups)
        with cancelled_at_exit(manager.cancel), loading_bar(use_tqdm_on_load) as bar:
            infos = manager.start(bar.show if use_tqdm_on_load else None, _is_wanted)
        self._client = EngineClient(self.config, tokens)
        self._streams = Streams(self._client)
        self.clients = ClientGroup(self._client)
        """All clients of the engine: other processes' may join."""
        self._supervisor = Supervisor(manager, self.clients, self.config)
        self._client.on_broken_stream = self._supervisor.report
        self._manager = manager
        self._supervisor.start()
        self.name: str = self.config.engine_name or manager.engine_id
        """By which `raycore status` and `raycore scale` find the engine, from any node of its Ray cluster."""
        self._read_status = partial(
            _read_status, self.name, self.config.model.model, manager, self._supervisor, self.clients
        )
        self._read_metrics = partial(_read_metrics, manager, self._supervisor, self.clients)
        self._control = ControlThread(self.name, self._read_status, self._supervisor.scale)
        self._control.start()
        export = Periodic("raycore-ray-metrics", INTERVAL_S, RayExport(self.name, self._read_metrics).report)
        export.start()
        for info in infos:
            logger.info(
                "rank dp%d is up: computes in %s, its KV cache holds %d tokens (%d blocks of %d), started in %s",
                *(info.dp_rank, info.dtype, info.num_kv_tokens, info.num_blocks, info.block_size, info.timings_s),
            )
        # runs at the latest when the interpreter exits
        self._finalizer = weakref.finalize(self, _stop, self._control, export, self.clients, self._supervisor, manager)
        end_before_ray(self._finalizer)
        end_with_task(self._finalizer)
        # an interrupt ends a caller's wait for it, but not the work: no engine is left half shut down
        self._stopper = threading.Thread(target=self._finalizer, name="raycore-shutdown")
        self._ending = threading.Lock()

    @classmethod
    @with_options(ENGINE_OPTIONS)
    def get_or_create(
        cls: type[_EngineT],
        model: str | os.PathLike[str],
        tokenizer: str | os.PathLike[str] | None = None,
        *,
        placement_groups: Sequence[PlacementGroup] | None = None,
        use_tqdm_on_load: bool = True,
        **options: Unpack[EngineOptions],
    ) -> _EngineT:
        """The engine that the last such call gave, if it still serves; with other arguments, another one in its place.

        For the cells of a notebook, which are run again. The program has one such engine for each `engine_name` (None
        is a name, too), whatever the class; it runs until `shutdown()`, also when nothing refers to it any more. The
        resolved configurations are compared: an option that is given its default value is no change, and ranks that
        `scale()` has added or removed stay as they are. Weights that were changed in place are not noticed.

        The arguments and errors are those of the class. An engine that is replaced is shut down before the new one
        starts, so that memory for both is never needed; its requests get an EngineDeadError that says so. It stays if
        the arguments are refused (InvalidConfig, InvalidCheckpoint), but not if the new engine doesn't come up.
        """
        config = _resolve(model, tokenizer, options)
        groups = None if placement_groups is None else list(placement_groups)
        with _keeping:
            old = _kept.get(config.engine_name)
            was_serving = old is not None and old.unavailable_reason is None
            if old is not None:
                changed = old._differences(cls, config, groups)
                if was_serving and not changed and isinstance(old, cls):
                    return old
                old._make_room(changed)
            try:
                engine = cls(model, tokenizer, placement_groups=groups, use_tqdm_on_load=use_tqdm_on_load, **options)
            except BaseException:
                if was_serving:
                    logger.warning("the engine before this one was shut down to make room for it: now there is none")
                raise
            _kept[config.engine_name] = engine
            return engine

    def __repr__(self) -> str:
        status = self._read_status()
        state = self.unavailable_reason or num_serving(status)
        return f"<{type(self).__name__} {self.name}, model {status.model}: {state}>"

    def _repr_html_(self) -> str:
        """What a notebook shows of it: the ranks as they were last heard of."""
        return engine_html(type(self).__name__, self._read_status(), self.unavailable_reason)

    @property
    def engine_infos(self) -> list[EngineInfo]:
        """What each rank said of itself when it came up, in rank order; a rank that is being replaced is missing."""
        return self._manager.infos

    @property
    def ranks(self) -> list[RankStatus]:
        """How the ranks are, in rank order: what is known here, without asking them; none after `shutdown()`."""
        return self._read_status().ranks

    def read_metrics(self) -> MetricsView:
        """What the ranks do and have done, as it is known here: what a Prometheus server, or a log line, shows."""
        return self._read_metrics()

    def trace_requests(self) -> None:
        """Have the outputs of requests that come from now on say, in their `trace`, what became of them when."""
        self._client.trace_requests()

    def scale(self, data_parallel_size: int, drain_timeout_s: float | None = None) -> None:
        """Have this many ranks, while requests run: none fails.

        New ranks serve when this returns. Ranks that leave finish what they have, for at most `drain_timeout_s` (None:
        as configured); what is left then goes on elsewhere.

        Raises:
            InvalidConfig: not a positive number.
            PlacementShortage: the cluster can't hold so many, with the table; nothing has changed. With
                `wait_for_nodes_s` an autoscaler gets that long to add nodes first.
            InitializationError: a new rank didn't come up; nothing has changed.
            EngineDeadError: the engine has failed, or was shut down.
        """
        self._supervisor.scale(data_parallel_size, drain_timeout_s)

    def report(self, dp_rank: int, reason: str) -> None:
        """Report a misbehaving rank, as another process's client sees it. It is killed and replaced."""
        self._supervisor.report(dp_rank, reason)

    def wait_for_completion_or_failure(self, timeout_s: float | None = None) -> bool:
        """Block until the engine has ended: for programs that only serve. False if it hasn't, `timeout_s` later.

        Raises:
            EngineDeadError: it failed, with the root cause. (One that was shut down did not.)
        """
        cause = self._supervisor.wait(timeout_s)
        if cause is not None:
            raise cause.with_traceback(None)  # which others may get, too
        return self._supervisor.has_ended

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer in use."""
        return self._client.tokenizer

    def get_default_sampling_params(self, **overrides: Any) -> SamplingParams:
        """vLLM's defaults, changed by the checkpoint's generation_config.json, changed by `overrides`."""
        return SamplingParams(**self.default_sampling_params | overrides)

    @property
    def default_sampling_params(self) -> dict[str, Any]:
        """What the checkpoint's generation_config.json sets, by the names of `SamplingParams`."""
        return self.config.model.default_sampling_params

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its output together, at most."""
        return self._client.max_model_len

    @property
    def num_unfinished_requests(self) -> int:
        """Requests under way, whichever thread waits for them."""
        return self.clients.num_unfinished_requests

    @property
    def unavailable_reason(self) -> str | None:
        """Why the engine takes no requests; None when it does. Asks nobody."""
        return self._client.unavailable_reason

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method (by name) or a callable (which gets the worker first) on every worker of every rank.

        Args:
            timeout: seconds; None: the configured `execute_timeout_s`.

        Returns: the results, by rank and then by worker.

        Raises: what a worker raised, its TimeoutError among it.
        """
        within = {} if timeout is None else {"timeout_s": timeout + RPC_GRACE_S}
        replies = self._client.utility("collective_rpc", (method, timeout, args, kwargs or {}), **within)
        return [result for reply in replies for result in reply]

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes. False when requests were running, which hold some of them."""
        return all(self._client.utility("reset_prefix_cache", ()))

    def check_health(self) -> None:
        """Raise EngineDeadError, or the workers' own failure, if something is wrong."""
        self._client.utility("check_health", ())

    def shutdown(self, drain_timeout_s: float = 0.0) -> None:
        """Stop everything that was started and give back what was reserved. Idempotent.

        With a `drain_timeout_s`, requests that other threads wait for may take that long to finish; those that don't
        end with what they have, and the finish reason `abort`. New ones are refused meanwhile.
        """
        if drain_timeout_s > 0 and self._finalizer.alive:
            self.clients.drain(drain_timeout_s)
            self.clients.abort_all()
        with self._ending:
            if self._stopper.ident is None:
                self._stopper.start()
        self._stopper.join()

    @contextmanager
    def draining_on_signals(self, drain_timeout_s: float | None = None) -> Generator[list[int], None, None]:
        """While the block runs, SIGTERM, SIGINT and SIGHUP don't interrupt it: what runs may finish.

        It may take `drain_timeout_s` (None: as configured). After that requests end with what they have, and the finish
        reason `abort`; at a second signal, at once. What follows the first signal within half a second is its echo, and
        SIGHUP always is: `timeout` signals a process and then its group. An ignored SIGHUP (`nohup`) stays ignored.
        For programs that serve or run a batch; call it on the main thread. `ray job stop` gives a program 3 seconds,
        unless RAY_JOB_STOP_WAIT_TIME_S says otherwise.

        Yields: the signals that came, without echoes.
        """
        timeout_s = self.config.recovery.drain_timeout_s if drain_timeout_s is None else drain_timeout_s
        came: list[int] = []

        def drain() -> None:
            if not self.clients.drain(timeout_s):
                self.clients.abort_all()

        def on_signal(number: int, frame: FrameType | None) -> None:
            if is_echo(number):
                return
            came.append(number)
            # not here: the main thread may hold the locks that these take
            work = drain if len(came) == 1 else self.clients.abort_all
            threading.Thread(target=work, name="raycore-drain", daemon=True).start()

        forget_signals()
        before = {number: signal.signal(number, on_signal) for number in ending_signals()}
        try:
            yield came
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _differences(
        self, cls: type[_Engine], config: EngineConfig, placement_groups: list[PlacementGroup] | None
    ) -> list[str]:
        """What is not as these arguments want it."""
        found = changes(self.config, config)
        if type(self) is not cls:
            found.insert(0, f"{cls.__name__}, was {type(self).__name__}")
        if placement_groups != self._brought_groups:
            found.append("other placement_groups")
        return found

    def _make_room(self, changed: Sequence[str]) -> None:
        """Shut down because another engine is to take this one's place."""
        reason = (
            f"the engine was shut down: get_or_create() was asked for another one in its place ({'; '.join(changed)})"
        )
        logger.info("%s", reason)
        self._client.close(EngineDeadError(reason))
        self.shutdown()


_EngineT = TypeVar("_EngineT", bound=_Engine)

_AsyncT = TypeVar("_AsyncT", bound="AsyncLLM")

_kept: dict[str | None, _Engine] = {}
"""What `get_or_create()` gave last, by engine name."""

_keeping = threading.Lock()


class LLM(_Engine):
    """An engine with a blocking interface.

    ::

        with LLM("path/to/checkpoint", data_parallel_size=2) as llm:
            for output in llm.generate(["Hello, my name is"], SamplingParams(max_tokens=32)):
                print(output.outputs[0].text)
    """

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts, in any number, and return when all are done.

        Args:
            prompts: one or a list of: text, token ids, `{"prompt": text}`, `{"prompt_token_ids": ids}`. Prompts with a
                `"cache_salt"` share cached prefixes only with those of the same salt.
            sampling_params: one for all, or one for each; None: `get_default_sampling_params()`.
            use_tqdm: show a progress bar with tokens a second.
            priority: one for each prompt, lower first; needs `scheduling_policy="priority"`.

        Returns: one output for each prompt, in their order.

        Raises:
            InvalidRequest: before anything runs, naming the prompt or parameter.
            RequestFailed: a request can't be finished; its `outputs` has what the others gave.
            EngineDeadError: the engine is gone, with the root cause.
        """
        parsed = parse_prompts(as_prompt_list(prompts), self._client.tokenizer)
        return self._run(parsed, sampling_params, use_tqdm, priority)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, priority: int = 0
    ) -> Generator[RequestOutput, None, None]:
        """Continue one prompt. Yields cumulative outputs; the last one is `finished`.

        Leaving the iteration early aborts the request. Who is slow to take an output gets the next one instead, which
        holds all of it.

        Raises:
            InvalidRequest: at the first step of the iteration, naming the prompt or parameter.
            RequestFailed: it can't be finished.
            EngineDeadError: the engine is gone, with the root cause.
        """
        parsed = parse_prompts([prompt], self._client.tokenizer)
        params = sampling_params or self.get_default_sampling_params()
        came: SimpleQueue[list[Update]] = SimpleQueue()
        request_ids = [uuid.uuid4().hex]
        try:
            self._client.submit(parsed, [params], came.put, stream=True, request_ids=request_ids, priorities=[priority])
            is_finished = False
            while not is_finished:
                update = came.get()[-1]
                while not came.empty():
                    update = came.get()[-1]
                if update.error is not None:
                    raise update.error.with_traceback(None)  # which others may get, too
                assert update.output is not None
                is_finished = update.output.finished
                yield update.output
        finally:
            # left early, or interrupted; one that has finished is unknown by now
            self._client.abort(request_ids)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, rendered with the model's chat template.

        Args:
            messages: `[{"role": "user", "content": "…"}, …]`, or a list of such lists. They become what the same
                messages become in a chat request to the server (`raycore.text.conversation`).
        """
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        tokenizer = self._client.tokenizer
        texts = [
            tokenizer.apply_chat_template(
                conversation,  # pyright: ignore[reportArgumentType]  # checked by the callee
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                tools=tools,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        # the template writes the special tokens itself
        return self._run(parse_prompts(texts, tokenizer, add_special_tokens=False), sampling_params, use_tqdm, None)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def _run(
        self,
        prompts: list[ParsedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priority: Sequence[int] | None,
    ) -> list[RequestOutput]:
        params = _params_for_each(sampling_params or self.get_default_sampling_params(), len(prompts))
        if not prompts:
            return []
        collector = _Collector()
        request_ids = [uuid.uuid4().hex for _ in prompts]
        try:
            self._client.submit(
                prompts,
                params,
                collector.put,
                flush_interval_s=coalescing_s(params),
                request_ids=request_ids,
                priorities=priority,
            )
            with request_bar(len(prompts), use_tqdm) as bar:
                collector.wait(len(prompts), bar, lambda: self._client.num_output_tokens)
        except BaseException:
            # an interrupted cell, too: the engine stays usable, and drops what nobody waits for
            self._client.abort(request_ids)
            raise
        return collector.outputs(request_ids)


class AsyncLLM(_Engine):
    """An engine with a streaming interface, for use from one or more event loops.

    The class itself blocks until the engine can serve. Where an event loop runs, use `create()`.
    """

    @classmethod
    @with_options(ENGINE_OPTIONS)
    async def create(
        cls: type[_AsyncT],
        model: str | os.PathLike[str],
        tokenizer: str | os.PathLike[str] | None = None,
        *,
        placement_groups: Sequence[PlacementGroup] | None = None,
        use_tqdm_on_load: bool = True,
        **options: Unpack[EngineOptions],
    ) -> _AsyncT:
        """Start an engine on a thread, so that the event loop stays free: for async actors and servers.

        The arguments and errors are those of the class. When the call is cancelled, the start is given up; the
        cancellation is raised once nothing of the engine is left.

        ::

            async with await AsyncLLM.create("path/to/checkpoint") as llm: ...
        """
        cancelled = threading.Event()
        make = partial(
            cls,
            model,
            tokenizer,
            placement_groups=placement_groups,
            use_tqdm_on_load=use_tqdm_on_load,
            _is_wanted=lambda: not cancelled.is_set(),
            **options,
        )
        # not a task, which a loop that ends would cancel, and the thread would work on unseen
        starting = asyncio.get_running_loop().run_in_executor(None, make)
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            cancelled.set()
            await asyncio.wait([starting])
            if starting.exception() is None:
                await asyncio.to_thread(starting.result().shutdown)
            raise

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        *,
        stream: bool = True,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue one prompt. Yields cumulative outputs; the last one is `finished`.

        Leaving the iteration early aborts the request. Who is slow to take an output gets the next one instead, which
        holds all of it.

        Args:
            stream: whether there are outputs before the last one. Without them it costs less.
            data_parallel_rank: the rank that gets the request. None: the one that has least to do or knows the prompt's
                beginning. While the rank is being replaced, and when it is lost, another one gets the request.

        Raises:
            InvalidRequest: at the first step of the iteration, naming the prompt or parameter.
            RequestFailed: it can't be finished.
            EngineDeadError: the engine is gone, with the root cause.
        """
        params = sampling_params or self.get_default_sampling_params()
        return self._streams.generate(
            prompt, params, request_id, priority, stream=stream, data_parallel_rank=data_parallel_rank
        )

    def check(self, prompt_token_ids: list[int], sampling_params: SamplingParams) -> None:
        """Raises InvalidRequest when the request could never run here; nothing is run. Thread-safe."""
        self._client.check(ParsedPrompt(None, prompt_token_ids), sampling_params)

    async def abort(self, request_id: str) -> None:
        """Drop a request. Its iterator ends with `finish_reason="abort"`. Unknown ids are ignored."""
        self._client.abort([request_id], notify=True)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.shutdown)


class _Collector:
    """Gathers the updates of one blocking call."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._finished: dict[str, RequestOutput] = {}
        self._failed: dict[str, RequestFailed] = {}
        self._error: BaseException | None = None

    def put(self, updates: list[Update]) -> None:
        """Called from the client's threads."""
        with self._changed:
            for update in updates:
                if isinstance(update.error, RequestFailed):
                    self._failed[update.request_id] = update.error
                else:
                    self._error = self._error or update.error
                if update.output is not None and update.output.finished:
                    self._finished[update.request_id] = update.output
            self._changed.notify()

    def wait(self, count: int, bar: RequestBar, num_tokens: Callable[[], int]) -> None:
        """Until `count` requests have ended. Raises the first error that concerns them all.

        `num_tokens` counts the engine's output tokens, for the bar.
        """
        started_s, num_before = time.perf_counter(), num_tokens()
        while True:
            with self._changed:
                if self._error is None and self._num_ended < count:
                    self._changed.wait(WAIT_S if bar.disable else BAR_S)
                if self._error is not None:
                    raise self._error
                done = self._num_ended
            if not bar.disable:
                rate = (num_tokens() - num_before) / (time.perf_counter() - started_s)
                bar.set_postfix_str(f"{rate:.1f} tokens/s", refresh=False)
                bar.n = done
                bar.refresh()
            if done == count:
                return

    def outputs(self, request_ids: Sequence[str]) -> list[RequestOutput]:
        """The outputs of these requests, which have ended. Raises RequestFailed if any failed; it has the others."""
        if self._failed:
            error = next(iter(self._failed.values()))
            error.outputs = [self._finished.get(request_id) for request_id in request_ids]
            raise error
        return [self._finished[request_id] for request_id in request_ids]

    @property
    def _num_ended(self) -> int:
        return len(self._finished) + len(self._failed)


def _params_for_each(params: SamplingParams | Sequence[SamplingParams], count: int) -> Sequence[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise InvalidRequest(f"{len(params)} sampling_params for {count} prompts: give one, or one for each")
    return params


def _resolve(
    model: str | os.PathLike[str], tokenizer: str | os.PathLike[str] | None, options: EngineOptions
) -> EngineConfig:
    return msgspec.structs.replace(resolve(model, tokenizer, **options), log_level=own_level())


def _read_status(
    name: str, model: str, manager: CoreEngineActorManager, supervisor: Supervisor, clients: ClientGroup
) -> EngineStatus:
    cause = supervisor.wait(0.0)
    return EngineStatus(
        name, model, rank_statuses(manager, supervisor, clients), failure=None if cause is None else str(cause)
    )


def _read_metrics(manager: CoreEngineActorManager, supervisor: Supervisor, clients: ClientGroup) -> MetricsView:
    return MetricsView(
        rank_statuses(manager, supervisor, clients), clients.counts(), manager.infos, clients.num_waiting_for_rank
    )


def _stop(
    control: ControlThread,
    export: Periodic,
    clients: ClientGroup,
    supervisor: Supervisor,
    manager: CoreEngineActorManager,
) -> None:
    export.stop()
    control.stop()
    supervisor.stop()
    if not is_exiting():  # daemon threads alone could wait then, and print what they get
        clients.on_rank_event(EngineLost(EngineDeadError("the engine was shut down")))
    control.join()
    manager.shutdown()
    supervisor.join(STOP_TIMEOUT_S)
