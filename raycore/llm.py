"""The public classes: `LLM`, whose calls block, and `AsyncLLM`, for asyncio."""

from __future__ import annotations

import asyncio
import os
import threading
import uuid
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

# imported before any module that imports Ray, because this import silences Ray's message about missing widgets
from raycore.display.progress_bars import request_bar

# isort: split

from raycore.activity import PauseMode
from raycore.client.collector import Collector
from raycore.client.inputs import ParsedPrompt, Prompt, as_prompt_list, params_for_each, parse_prompts, with_adapters
from raycore.client.updates import Update, coalescing_s
from raycore.config import ENGINE_OPTIONS
from raycore.config.options import with_options
from raycore.lora.request import LoRARequest
from raycore.node.threads import on_own_thread
from raycore.outputs import RequestOutput
from raycore.running_engine import RunningEngine
from raycore.sampling_params import SamplingParams

if TYPE_CHECKING:
    from types import TracebackType

    from ray.util.placement_group import PlacementGroup
    from typing_extensions import Unpack

    from raycore.config.option_types import EngineOptions

Messages = Sequence[dict[str, Any]]

_AsyncT = TypeVar("_AsyncT", bound="AsyncLLM")


class LLM(RunningEngine):
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
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Continue one or more prompts. Returns when all are finished.

        Args:
            prompts: one prompt or a list. A prompt is text, token ids, `{"prompt": text}` or
                `{"prompt_token_ids": ids}`. Prompts with a `"cache_salt"` share cached prefixes only with prompts
                that have the same one.
            sampling_params: one for all prompts, or one per prompt. None: `get_default_sampling_params()`.
            use_tqdm: show a progress bar with tokens per second.
            priority: one per prompt; lower values run first. Needs `scheduling_policy="priority"`.
            lora_request: an adapter for all prompts, or one per prompt, where None means none. Needs `enable_lora`.

        Returns: one output per prompt, in order.

        Raises:
            InvalidRequest: a prompt or parameter is unusable; the message names it. Nothing was run.
            RequestFailed: a request failed, but the engine didn't. The exception has the outputs of the other requests
                in `outputs`.
            EngineDeadError: the engine has failed, was shut down or is draining; the message begins with the cause.
        """
        parsed = parse_prompts(as_prompt_list(prompts), self._client.tokenizer)
        return self._run(with_adapters(parsed, lora_request), sampling_params, use_tqdm, priority)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Continue one prompt. Yields cumulative outputs; the last one is `finished`.

        Leaving the iteration early aborts the request. A slow consumer doesn't get every output, but each output has
        the whole text so far.

        Raises:
            InvalidRequest: the prompt or a parameter is unusable. Raised at the first step of the iteration.
            RequestFailed: the request failed, but the engine didn't.
            EngineDeadError: the engine has failed, was shut down or is draining; the message begins with the cause.
        """
        parsed = with_adapters(parse_prompts([prompt], self._client.tokenizer), lora_request)
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
                    raise update.error.with_traceback(None)  # other threads may raise the same error
                assert update.output is not None
                is_finished = update.output.finished
                yield update.output
        finally:
            # for an iteration that was left early or interrupted; has no effect on a finished request
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
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, rendered with the model's chat template.

        Args:
            messages: `[{"role": "user", "content": "…"}, …]`, or a list of such lists. They are
                normalized as in a chat request to the server (`raycore.text.conversation`).
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
        # special tokens are part of the template's text
        parsed = with_adapters(parse_prompts(texts, tokenizer, add_special_tokens=False), lora_request)
        return self._run(parsed, sampling_params, use_tqdm, None)

    # ---- calls on all ranks

    def scale(self, data_parallel_size: int, drain_timeout_s: float | None = None) -> None:
        """Change the number of ranks while requests run. No request fails.

        Returns when new ranks serve and removed ranks have stopped. The ranks with the highest numbers are removed.
        They have `drain_timeout_s` seconds to finish their requests (None: the option `drain_timeout_s`). The rest of
        their requests continue on other ranks.

        Ranks that share experts pause while experts move between them. The checkpoint isn't read again. If a rank fails
        meanwhile, all of them are restarted, and their requests continue. An engine that is asleep is restarted, too.

        Raises:
            InvalidConfig: `data_parallel_size` is not positive, or a worker has too little memory for its share of the
                experts. Nothing has changed.
            PlacementShortage: the cluster cannot fit that many ranks; the message has a table. Nothing has changed. If
                `wait_for_nodes_s` is set, an autoscaler first gets that many seconds to add nodes.
            InitializationError: a new rank failed to start. The number of ranks has not changed.
            EngineDeadError: the engine has failed or was shut down.
        """
        self._calls.scale(data_parallel_size, drain_timeout_s)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method on every worker of every rank.

        Args:
            method: the method's name, or a callable that takes the worker as its first argument.
            timeout: seconds to wait for all replies. None: the option `execute_timeout_s`.

        Returns: the results, ordered by rank and then by worker.

        Raises: whatever a worker raised; RpcTimeout, which is a TimeoutError, if a worker does not reply in time.
        """
        return self._calls.collective_rpc(method, timeout, args, kwargs)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Clear the prefix cache of each rank that runs no requests. Returns whether all ranks' caches were cleared.

        Args:
            reset_running_requests: clear the caches of the other ranks, too. Their running requests lose their keys and
                values, and are computed again.
            reset_connector: has no effect, because raycore has no KV connectors.
        """
        return self._calls.reset_prefix_cache(reset_running_requests)

    def save_sharded_state(
        self, path: str | os.PathLike[str], pattern: str | None = None, max_size: int | None = None
    ) -> None:
        """Write the weights as the workers divide them, for engines with `load_format="sharded_state"`.

        Such an engine starts sooner, because each worker reads only its own files. `path` becomes a checkpoint
        directory, with config.json and the tokenizer's files. Each worker writes on its own node, and needs memory for
        another copy of its weights meanwhile. Steps wait.

        Args:
            path: the directory. It is created if it is missing.
            pattern: the files' names, with the fields `{rank}` and `{part}`. None:
                `model-rank-{rank}-part-{part}.safetensors`.
            max_size: the number of bytes at which a worker begins another file. None: one file for each worker.

        Raises:
            InvalidConfig: the pattern can't be used, or the checkpoint's weights are quantized.
            WorkerFailed: a file can't be written.
        """
        self._calls.save_sharded_state(path, pattern, max_size)

    def check_health(self) -> None:
        """Check all workers of all ranks. Raises EngineDeadError or a worker's own error if a worker isn't healthy."""
        self._calls.check_health()

    def pause_generation(self, *, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Pause the engine, for example to change its weights. `resume_generation()` ends the pause.

        When this returns, all outputs have been delivered, and no token comes until the engine is resumed. Requests
        that are submitted meanwhile are accepted, and wait. So do requests whose rank is lost during the call.

        Args:
            mode: what happens to unfinished requests. `abort`: they end with their output so far and the finish reason
                `abort`. `wait`: they finish first. `keep`: they freeze, and continue after the pause.
            clear_cache: drop the prefix cache, and the keys and values of unfinished requests, which are computed
                again after the pause.

        Raises:
            InvalidInput: the mode is unknown, or is `wait` although the engine is asleep.
            RaycoreError: another call ended the wait for requests to finish (mode `wait`).
            EngineDeadError: the engine has failed or was shut down.
        """
        self._calls.pauses.pause(mode, clear_cache)

    def resume_generation(self) -> None:
        """End a pause. Returns when all ranks run again. Does nothing if the engine isn't paused.

        Raises:
            InvalidInput: the engine is asleep. `wake_up()` wakes it.
            EngineDeadError: the engine has failed or was shut down.
        """
        self._calls.pauses.resume()

    def is_paused(self) -> bool:
        """Whether the engine is paused or asleep."""
        return self._calls.pauses.activity.is_paused

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Pause the engine, and give up memory. `wake_up()` ends the sleep.

        When this returns, ranks have given the memory back to the operating system or the device.

        Args:
            level: what is given up. 1: the KV cache, and on GPUs the memory of weights, which move to the host's
                memory. 2: the KV cache and the weights. 0: nothing, the engine is only paused.
            mode: what happens to unfinished requests, as in `pause_generation()`.

        Raises:
            InvalidInput: an argument is invalid.
            WorkerFailed: a worker failed to give up its memory.
            EngineDeadError: the engine has failed or was shut down.
        """
        self._calls.pauses.sleep(level, mode)

    def wake_up(self, tags: list[str] | None = None) -> bool:
        """End a sleep or a pause. After a sleep of level 2, weights are loaded again from the checkpoint.

        Args:
            tags: what to wake: `weights`, `kv_cache`, or both. The engine runs again when everything is awake. None:
                everything. `scheduling`, which changes nothing else, ends a pause.

        Returns: whether everything is awake, and the engine runs again.

        Raises:
            InvalidInput: a tag is unknown.
            WorkerFailed: a worker failed, for example because the checkpoint is gone. The engine stays paused, and the
                worker's rank is replaced.
            EngineDeadError: the engine has failed or was shut down.
        """
        return self._calls.pauses.wake_up(tags)

    def is_sleeping(self) -> bool:
        """Whether the engine sleeps at any level. A pause is a sleep of level 0."""
        return self._calls.pauses.activity.is_paused

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Have all ranks hold an adapter, so that its first request needn't wait for it. Steps go on meanwhile.

        Returns when the workers of all ranks hold the adapter. Ranks that join later, or that replace a lost one, hold
        it before they serve. It can be evicted to make room for others, and is then read again when a request needs
        it; `pin_lora()` prevents that. If it can't be read on every rank, none keeps it.

        Requests with the same name and number use what was added, whatever path they give.

        Args:
            lora_request: the adapter. With `load_inplace`, it replaces the added adapter with the same name and number:
                requests that are submitted after this call use the files that are there now, and those that have begun
                finish with the weights that they began with.

        Returns: True; False if the adapter was added before and isn't replaced.

        Raises:
            InvalidAdapter: the directory is missing or damaged, isn't made for the model, or can't be read on a rank.
            InvalidRequest: the engine has no `enable_lora`, or the number or the name belongs to another adapter that
                was added.
            InvalidInput: no place is left, because all `max_cpu_loras` adapters are pinned or used by unfinished
                requests, or the engine is asleep.
            EngineDeadError: the engine has failed or was shut down.
        """
        return self._calls.adapters.add(lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        """Undo `add_lora()`, and a pin. Unfinished requests that use the adapter finish first; this doesn't wait.

        A request that names the adapter later reads it again.

        Args:
            lora_id: the `lora_int_id` of an adapter.

        Returns: True; False if no adapter with this number was added.

        Raises:
            InvalidInput: `lora_id` isn't an integer.
            EngineDeadError: the engine has failed or was shut down.
        """
        return self._calls.adapters.remove(lora_id)

    def list_loras(self) -> set[int]:
        """The numbers of the adapters that were added and not removed. Those that only came with requests don't count.

        Ranks needn't hold all of them: an adapter that isn't pinned may have made room for others.
        """
        return self._calls.adapters.ids()

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an added adapter on all ranks until it is removed. Reads it again where it has made room for others.

        Args:
            lora_id: the `lora_int_id` of an adapter.

        Returns: True.

        Raises:
            InvalidInput: no adapter with this number was added, no place is left (see `add_lora()`), or the engine is
                asleep.
            InvalidAdapter: the adapter can't be read any more.
            EngineDeadError: the engine has failed or was shut down.
        """
        return self._calls.adapters.pin(lora_id)

    def start_profile(
        self,
        profile_prefix: str | None = None,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Start a profile of all ranks' steps. Needs the option `profiler_config`.

        Each worker and each rank's engine writes a file that Perfetto opens, on its own node. What torch's profiler
        records slows steps down.

        Args:
            profile_prefix: the beginning of the files' names.
            delay_iterations: number of steps that each rank runs before recording begins. None: the configured number.
            max_iterations: number of recorded steps after which the profile ends by itself. 0: no limit. None: the
                configured number.

        Raises:
            InvalidInput: an argument is invalid, a profile is running, or `profiler_config` isn't set.
            WorkerFailed: a file can't be created.
        """
        self._calls.start_profile(profile_prefix, delay_iterations, max_iterations)

    def stop_profile(self) -> None:
        """End the profile, and return when its files are written. Does nothing if no profile is running.

        Raises:
            InvalidConfig: `profiler_config` isn't set.
            WorkerFailed: a file can't be written.
        """
        self._calls.stop_profile()

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
        params = params_for_each(sampling_params or self.get_default_sampling_params(), len(prompts))
        if not prompts:
            return []
        collector = Collector()
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
            # also after an interrupt: the engine stays usable, and must not compute requests that nobody waits for
            self._client.abort(request_ids)
            raise
        return collector.outputs(request_ids)


class AsyncLLM(RunningEngine):
    """An engine with an asynchronous interface. Several event loops may share it.

    The constructor blocks until the engine can serve. Inside a running event loop, use `create()`.
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
        """Start an engine without blocking the event loop, for async actors and servers.

        The arguments and errors are those of the class. If the call is cancelled, it stops the engine that it was
        starting, and raises CancelledError when the engine's processes have ended.

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
        # not in a task: a loop that ends would cancel the task, but the task's thread would go on unnoticed
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
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue one prompt. Yields cumulative outputs; the last one is `finished`.

        Leaving the iteration early aborts the request. A slow consumer doesn't get every output, but each output has
        the whole text so far.

        Args:
            request_id: must not be the id of another unfinished request. None: a random id.
            priority: lower values run first. Needs `scheduling_policy="priority"`.
            stream: False yields only the final output, which costs less.
            data_parallel_rank: the rank that gets the request. None: raycore chooses one by load and cached prefixes.
                Another rank gets the request if the given one is being replaced or is lost.
            lora_request: the adapter that the request uses. Needs `enable_lora`.

        Raises:
            InvalidRequest: the prompt or a parameter is unusable. Raised at the first step of the iteration.
            RequestFailed: the request failed, but the engine didn't.
            EngineDeadError: the engine has failed, was shut down or is draining; the message begins with the cause.
        """
        params = sampling_params or self.get_default_sampling_params()
        return self._streams.generate(
            prompt,
            params,
            request_id,
            priority,
            stream=stream,
            data_parallel_rank=data_parallel_rank,
            lora_request=lora_request,
        )

    def check(self, prompt_token_ids: list[int], sampling_params: SamplingParams) -> None:
        """Raise InvalidRequest if the request could never run. Doesn't submit it. Thread-safe."""
        self._client.check(ParsedPrompt(None, prompt_token_ids), sampling_params)

    async def abort(self, request_id: str) -> None:
        """Abort a request. Its iterator ends with an output whose `finish_reason` is `abort`. Ignores unknown ids."""
        self._client.abort([request_id], notify=True)

    # ---- calls on all ranks: see the methods of `LLM`. A call that is cancelled goes on in the background.

    async def scale(self, data_parallel_size: int, drain_timeout_s: float | None = None) -> None:
        """See `LLM.scale`."""
        await on_own_thread(self._calls.scale, data_parallel_size, drain_timeout_s)

    async def scale_elastic_ep(self, new_data_parallel_size: int, drain_timeout: float = 300) -> None:
        """The same as `scale(new_data_parallel_size, drain_timeout)`, under vLLM's name."""
        await self.scale(new_data_parallel_size, drain_timeout)

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """See `LLM.collective_rpc`."""
        return await on_own_thread(self._calls.collective_rpc, method, timeout, args, kwargs)

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """See `LLM.reset_prefix_cache`."""
        return await on_own_thread(self._calls.reset_prefix_cache, reset_running_requests)

    async def save_sharded_state(
        self, path: str | os.PathLike[str], pattern: str | None = None, max_size: int | None = None
    ) -> None:
        """See `LLM.save_sharded_state`."""
        await on_own_thread(self._calls.save_sharded_state, path, pattern, max_size)

    async def check_health(self) -> None:
        """See `LLM.check_health`."""
        await on_own_thread(self._calls.check_health)

    async def pause_generation(self, *, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """See `LLM.pause_generation`."""
        await on_own_thread(self._calls.pauses.pause, mode, clear_cache)

    async def resume_generation(self) -> None:
        """See `LLM.resume_generation`."""
        await on_own_thread(self._calls.pauses.resume)

    async def is_paused(self) -> bool:
        """See `LLM.is_paused`."""
        return self._calls.pauses.activity.is_paused

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """See `LLM.sleep`."""
        await on_own_thread(self._calls.pauses.sleep, level, mode)

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        """See `LLM.wake_up`."""
        return await on_own_thread(self._calls.pauses.wake_up, tags)

    async def is_sleeping(self) -> bool:
        """See `LLM.is_sleeping`."""
        return self._calls.pauses.activity.is_paused

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """See `LLM.add_lora`."""
        return await on_own_thread(self._calls.adapters.add, lora_request)

    async def remove_lora(self, lora_id: int) -> bool:
        """See `LLM.remove_lora`."""
        return await on_own_thread(self._calls.adapters.remove, lora_id)

    async def list_loras(self) -> set[int]:
        """See `LLM.list_loras`."""
        return self._calls.adapters.ids()

    async def pin_lora(self, lora_id: int) -> bool:
        """See `LLM.pin_lora`."""
        return await on_own_thread(self._calls.adapters.pin, lora_id)

    async def start_profile(
        self,
        profile_prefix: str | None = None,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """See `LLM.start_profile`."""
        await on_own_thread(self._calls.start_profile, profile_prefix, delay_iterations, max_iterations)

    async def stop_profile(self) -> None:
        """See `LLM.stop_profile`."""
        await on_own_thread(self._calls.stop_profile)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.shutdown)
