"""The calls on a running engine: what they do, and what they are called in `LLM` and `AsyncLLM`.

A call is one method of `EngineCalls` and one line of `AsyncCalls`. Whoever offers calls gets them from there: `LLM`,
`AsyncLLM`, the API servers' processes (`server/multi_process/client_engine.py`), the endpoints that control the engine
(`server/operations/admin.py`) and other processes of the cluster (`REMOTE_CALLS`).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

from raycore.activity import PauseMode
from raycore.checkpoint.sharded_state import checked_pattern
from raycore.client.client import UTILITY_TIMEOUT_S, EngineClient
from raycore.client.group import ClientGroup
from raycore.cluster.supervisor import Supervisor
from raycore.config import EngineConfig
from raycore.control.pauses import Pauses
from raycore.errors import InvalidConfig, InvalidInput
from raycore.json_fields import shortened
from raycore.lora.request import LoRARequest
from raycore.options.numbers import MAX_SECONDS
from raycore.parts.adapters.control import AdapterCalls
from raycore.parts.weights.control.requests import WeightTransferInitRequest, WeightTransferUpdateRequest
from raycore.parts.weights.control.updates import WeightUpdates
from raycore.short_tracebacks import ends_tracebacks
from raycore.system import os

P = ParamSpec("P")
T = TypeVar("T")

RPC_GRACE_S = 5.0
"""How many seconds longer the caller of `collective_rpc` waits than the ranks, so that a rank can still report which of
its workers is late."""

REMOTE_CALLS = frozenset(
    {
        *("scale", "reload_weights", "update_weight_version"),
        *("start_weight_update", "update_weights", "finish_weight_update", "cancel_weight_update"),
    }
)
"""The calls that other processes of the cluster may make: with commands such as `raycore scale`, and with
`RemoteEngine.call`."""

_SLEEP_CALLS = ("sleep", "wake_up")
"""The engine's calls that have the names of workers' methods."""


def check_seconds(name: str, value: float | None) -> None:
    """Raise InvalidInput if an argument isn't a number of seconds to wait."""
    if value is not None and not 0 <= value <= MAX_SECONDS:
        raise InvalidInput(f"{name}={value} isn't between 0 and {MAX_SECONDS:g} seconds")


class EngineParts(NamedTuple):
    """What carries out the calls on an engine."""

    client: EngineClient
    """Calls utilities of the ranks: those in `engine/utilities.py`."""
    clients: ClientGroup
    supervisor: Supervisor
    pauses: Pauses
    adapters: AdapterCalls
    weights: WeightUpdates
    config: EngineConfig


@ends_tracebacks
class EngineCalls:
    """The calls on one engine. They block until its ranks have replied. Thread-safe."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts

    def scale(self, data_parallel_size: int, drain_timeout_s: float | None = None) -> None:
        """Change the number of ranks while requests run. No request fails.

        Returns when new ranks serve and removed ranks have stopped. The ranks with the highest numbers are removed.
        They have `drain_timeout_s` seconds to finish their requests (None: the option `drain_timeout_s`). The rest of
        their requests continue on other ranks.

        Ranks that share experts pause while experts move between them. The checkpoint isn't read again. If a rank fails
        meanwhile, all of them are restarted, and their requests continue. An engine that is asleep is restarted, too.

        Raises:
            InvalidConfig: `data_parallel_size` is not positive or far too large, or another option excludes it, as at
                the start, or a worker has too little memory for its share of the experts. Nothing has changed.
            InvalidCheckpoint: the files of load_format="sharded_state", which are read again, are damaged. Nothing has
                changed.
            InvalidInput: `drain_timeout_s` is negative or far too large.
            PlacementShortage: the cluster cannot fit that many ranks; the message has a table. Nothing has changed. If
                `wait_for_nodes_s` is set, an autoscaler first gets that many seconds to add nodes.
            InitializationError: a new rank failed to start. The number of ranks has not changed.
            EngineDeadError: the engine has failed or was shut down.
        """
        check_seconds("drain_timeout_s", drain_timeout_s)
        self._parts.supervisor.scale(data_parallel_size, drain_timeout_s)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method on every worker of every rank that is up, also of ranks without weights to serve with, to which
        the method may bring some.

        Args:
            method: the method's name, or a callable that takes the worker as its first argument. `sleep` and `wake_up`
                are those of the engine.
            timeout: seconds to wait for all replies. None: the option `execute_timeout_s`.

        Returns: the results, ordered by rank and then by worker.

        Raises: whatever a worker raised; InvalidInput if workers have no such method, or it doesn't take the arguments,
            or the timeout is negative or far too large; RpcTimeout, which is a TimeoutError, if a worker does not reply
            in time.
        """
        check_seconds("timeout", timeout)
        if isinstance(method, str) and method in _SLEEP_CALLS:  # else ranks would send steps to workers that sleep
            getattr(self, method)(*args, **(kwargs or {}))
            return [None] * (self._parts.config.parallel.world_size * len(self._parts.supervisor.watches()))
        within_s = UTILITY_TIMEOUT_S if timeout is None else timeout + RPC_GRACE_S
        arguments, stale = (method, timeout, args, kwargs or {}), self._parts.weights.stale_ranks()
        replies = self._parts.client.utility("collective_rpc", arguments, within_s, others=stale)
        return [result for reply in replies for result in reply]

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Call a function on the model of every worker, a `raycore.decoder.network.Network`.

        Returns: the results, ordered by rank and then by worker.

        Raises: whatever a worker raised; RpcTimeout, which is a TimeoutError, if a worker does not reply in time.
        """
        return self.collective_rpc("apply_model", args=(func,))

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Clear the prefix cache of each rank that runs no requests. Returns whether all ranks' caches were cleared.

        Args:
            reset_running_requests: clear the caches of the other ranks, too. Their running requests lose their keys and
                values, and are computed again.
            reset_connector: have the KV connector forget what it keeps, too.
        """
        return all(self._parts.client.utility("reset_prefix_cache", (reset_running_requests, reset_connector)))

    def reset_mm_cache(self) -> None:
        """Drop the processed images that all ranks and clients keep. Those of unfinished requests stay.

        A client is the program that has created the engine, or the process of an API server.
        """
        self._parts.clients.forget_images()
        self._parts.client.utility("reset_mm_cache", ())

    def reset_encoder_cache(self) -> None:
        """Drop the embeddings of images that workers keep, for example after the weights have changed.

        Workers give up their memory at the begin of the next step. Requests that have begun to use some are computed
        again.
        """
        self._parts.client.utility("reset_encoder_cache", ())

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
            InvalidConfig: the pattern can't be used, the checkpoint's weights are quantized, or the model pools.
            WorkerFailed: a file can't be written.
        """
        parts = self._parts
        config = parts.config.with_num_ranks(max(1, len(parts.supervisor.watches())))
        if config.model.spec.quantization is not None:
            raise InvalidConfig(f"{config.model.model} has quantized weights, which save_sharded_state() can't write")
        if config.model.spec.pooling is not None:
            raise InvalidConfig(f"save_sharded_state() can't write {config.model.model}, a model that pools")
        arguments = os.path.abspath(Path(path).expanduser()), checked_pattern(pattern, config.division), max_size
        # ranks that share no experts all have the same weights
        num_ranks = None if config.parallel.enable_expert_parallel else 1
        timeout_s = config.executor.init_timeout_s + RPC_GRACE_S
        parts.client.utility("save_sharded_state", arguments, timeout_s, num_ranks=num_ranks)

    def check_health(self) -> None:
        """Check all workers of all ranks. Raises EngineDeadError or a worker's own error if a worker isn't healthy."""
        self._parts.client.utility("check_health", ())

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
        self._parts.pauses.pause(mode, clear_cache)

    def resume_generation(self) -> None:
        """End a pause. Returns when all ranks run again. Does nothing if the engine isn't paused.

        Raises:
            InvalidInput: the engine is asleep. `wake_up()` wakes it.
            EngineDeadError: the engine has failed or was shut down.
        """
        self._parts.pauses.resume()

    def is_paused(self) -> bool:
        """Whether the engine is paused or asleep."""
        return self._parts.pauses.activity.is_paused

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
        if level not in (0, 1, 2):
            raise InvalidInput(f"sleep(): level={level!r} isn't 0, 1 or 2")
        self._parts.pauses.pause(mode, clear_cache=level > 0, sleep_level=level)

    def wake_up(self, tags: list[str] | None = None, reads_weights: bool = True) -> bool:
        """End a sleep or a pause. After a sleep of level 2, weights are loaded again from the checkpoint.

        Args:
            tags: what to wake: `weights`, `kv_cache`, or both. The engine runs again when everything is awake. None:
                everything. `scheduling`, which changes nothing else, ends a pause.
            reads_weights: False: weights that a sleep of level 2 has dropped aren't loaded. Requests wait until an
                update has brought all weights, or `reload_weights()` has read them.

        Returns: whether everything is awake, and the engine runs again.

        Raises:
            InvalidInput: a tag is unknown, or `reads_weights` is False although the model's weights can't be changed.
            WorkerFailed: a worker failed, for example because the checkpoint is gone. The engine stays paused, and the
                worker's rank is replaced.
            EngineDeadError: the engine has failed or was shut down.
        """
        if not reads_weights:
            self._parts.weights.check_can_change("wake_up(reads_weights=False)")
        return self._parts.pauses.wake_up(tags, reads_weights)

    def is_sleeping(self) -> bool:
        """Whether the engine sleeps at any level. A pause is a sleep of level 0."""
        return self._parts.pauses.activity.is_paused

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
            InvalidInput: no slot is left, because all `max_cpu_loras` adapters are pinned or used by unfinished
                requests, or the engine is asleep.
            EngineDeadError: the engine has failed or was shut down.
        """
        return self._parts.adapters.add(lora_request)

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
        return self._parts.adapters.remove(lora_id)

    def list_loras(self) -> set[int]:
        """The numbers of the adapters that were added and not removed. Those that only came with requests don't count.

        Ranks needn't hold all of them: an adapter that isn't pinned may have made room for others.
        """
        return self._parts.adapters.ids()

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an added adapter on all ranks until it is removed. Reads it again where it has made room for others.

        Args:
            lora_id: the `lora_int_id` of an adapter.

        Returns: True.

        Raises:
            InvalidInput: no adapter with this number was added, no slot is left (see `add_lora()`), or the engine is
                asleep.
            InvalidAdapter: the adapter can't be read any more.
            EngineDeadError: the engine has failed or was shut down.
        """
        return self._parts.adapters.pin(lora_id)

    def init_weight_transfer_engine(self, request: WeightTransferInitRequest | dict[str, Any]) -> None:
        """Have all workers connect to a trainer, by the way that `weight_transfer_config` names.

        Args:
            request: what the way needs, in `init_info`.

        Raises:
            InvalidInput: the information is invalid, the engine has no `weight_transfer_config`, or an update is under
                way.
            RaycoreError: a worker can't connect.
            EngineDeadError: the engine has failed or was shut down.
        """
        self._parts.weights.transfer_engine("init_weight_transfer_engine", _field_of(request, "init_info"))

    def shutdown_weight_transfer_engine(self) -> None:
        """Have all workers disconnect from the trainer. The engine goes on.

        Raises: as `init_weight_transfer_engine()`.
        """
        self._parts.weights.transfer_engine("shutdown_weight_transfer_engine")

    def start_weight_update(self) -> None:
        """Begin to change the weights: `update_weights()` brings tensors, and `finish_weight_update()` ends the update.

        Pauses the engine, in mode `keep`, unless it is paused. Until the end of the update, no step runs.

        The update is given up, as by `cancel_weight_update()`, if its next call doesn't come within
        `weight_update_timeout_s`.

        Raises:
            InvalidInput: an update is under way, or the weights are asleep.
            EngineDeadError: the engine has failed or was shut down.
        """
        self._parts.weights.start()

    def start_draft_weight_update(self) -> None:
        """Refused: the weights of draft models can't be changed.

        Raises:
            InvalidInput: always.
        """
        raise InvalidInput("start_draft_weight_update(): the weights of draft models can't be changed")

    def update_weights(self, request: WeightTransferUpdateRequest | dict[str, Any]) -> None:
        """Bring tensors to all workers. May be called again and again.

        If a call fails on some ranks, the others go on. Those get the weights from the others at the end.

        Args:
            request: what to bring, in `update_info`: a dict, or a list with one for each worker of all ranks.

        Raises:
            InvalidInput: no update is under way, or a tensor's name or shape is wrong. Nothing has changed, and the
                update goes on.
            RaycoreError: the tensors didn't arrive on any rank. The update has ended, as by `cancel_weight_update()`.
            EngineDeadError: the engine has failed or was shut down.
        """
        self._parts.weights.update(_field_of(request, "update_info"))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Apply what has come, and continue. The prefix cache is emptied, and frozen requests are computed again.

        Args:
            weight_version: what the new weights are called, for example in outputs. None: the same as the old ones.

        Raises:
            InvalidInput: no update is under way, or what has come can't be applied. The update goes on.
            RaycoreError: no rank could apply it. The update has ended, as by `cancel_weight_update()`.
            EngineDeadError: the engine has failed or was shut down.
        """
        self._parts.weights.finish(weight_version)

    def cancel_weight_update(self) -> None:
        """Give up an update, if one is under way, and continue with the weights that were there before.

        If some were changed already, they are read again from their checkpoint. If they didn't come from one, the ranks
        are out of service until an update brings all weights: no request sees weights of two versions.

        Raises:
            EngineDeadError: the engine has failed or was shut down.
        """
        self._parts.weights.cancel()

    def reload_weights(self, path: str | os.PathLike[str] | None = None, weight_version: str | None = None) -> None:
        """Take the weights of a checkpoint of the same model, in place. Requests freeze meanwhile, and then continue.

        Ranks that join later read the same checkpoint.

        Args:
            path: its directory. None: read the checkpoint again that the weights came from last.
            weight_version: what the new weights are called. None: the same as the old ones.

        Raises:
            InvalidCheckpoint: the directory is missing or damaged, or has another model. Nothing has changed.
            InvalidInput: an update is under way, or the weights are asleep.
            RaycoreError: no rank could read the checkpoint. They have the weights from before.
            EngineDeadError: the engine has failed or was shut down.
        """
        self._parts.weights.reload(None if path is None else os.fspath(path), weight_version)

    def update_weight_version(self, new_version: str) -> None:
        """Call the weights something else, without changing them.

        Raises:
            InvalidInput: it isn't a non-empty string.
            EngineDeadError: the engine has failed or was shut down.
        """
        self._parts.weights.rename(new_version)

    def get_weight_version(self) -> str:
        """What the weights are called. At the engine's start, `default`."""
        return self._parts.weights.version

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
        self._parts.client.utility("profile", (True, profile_prefix, delay_iterations, max_iterations))

    def stop_profile(self) -> None:
        """End the profile, and return when its files are written. Does nothing if no profile is running.

        Raises:
            InvalidConfig: `profiler_config` isn't set.
            WorkerFailed: a file can't be written.
        """
        self._parts.client.utility("profile", (False,))


def _field_of(request: object, name: str) -> Any:
    """A field of one of vLLM's requests, or of a dict in its place."""
    fields: Any = request
    value = fields.get(name) if isinstance(request, dict) else getattr(request, name, None)
    if value is None:
        raise InvalidInput(f"request={shortened(fields)} has no {name}")
    return value


def asynchronous(call: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """A method of `AsyncCalls` with the signature and the docstring of a method of `EngineCalls`."""

    @wraps(call)
    async def method(self: AsyncCalls, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._call(call, *args, **kwargs)  # pyright: ignore[reportPrivateUsage]  # it is their method

    return method


class AsyncCalls(Protocol):
    """The same calls for asyncio. A call that is cancelled goes on in the background."""

    async def _call(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make a call, one of the methods of `EngineCalls`, with these arguments. Returns its result."""
        ...

    scale = asynchronous(EngineCalls.scale)
    collective_rpc = asynchronous(EngineCalls.collective_rpc)
    apply_model = asynchronous(EngineCalls.apply_model)
    reset_prefix_cache = asynchronous(EngineCalls.reset_prefix_cache)
    reset_mm_cache = asynchronous(EngineCalls.reset_mm_cache)
    reset_encoder_cache = asynchronous(EngineCalls.reset_encoder_cache)
    save_sharded_state = asynchronous(EngineCalls.save_sharded_state)
    check_health = asynchronous(EngineCalls.check_health)
    pause_generation = asynchronous(EngineCalls.pause_generation)
    resume_generation = asynchronous(EngineCalls.resume_generation)
    is_paused = asynchronous(EngineCalls.is_paused)
    sleep = asynchronous(EngineCalls.sleep)
    wake_up = asynchronous(EngineCalls.wake_up)
    is_sleeping = asynchronous(EngineCalls.is_sleeping)
    add_lora = asynchronous(EngineCalls.add_lora)
    remove_lora = asynchronous(EngineCalls.remove_lora)
    list_loras = asynchronous(EngineCalls.list_loras)
    pin_lora = asynchronous(EngineCalls.pin_lora)
    init_weight_transfer_engine = asynchronous(EngineCalls.init_weight_transfer_engine)
    shutdown_weight_transfer_engine = asynchronous(EngineCalls.shutdown_weight_transfer_engine)
    start_weight_update = asynchronous(EngineCalls.start_weight_update)
    start_draft_weight_update = asynchronous(EngineCalls.start_draft_weight_update)
    update_weights = asynchronous(EngineCalls.update_weights)
    finish_weight_update = asynchronous(EngineCalls.finish_weight_update)
    cancel_weight_update = asynchronous(EngineCalls.cancel_weight_update)
    reload_weights = asynchronous(EngineCalls.reload_weights)
    update_weight_version = asynchronous(EngineCalls.update_weight_version)
    get_weight_version = asynchronous(EngineCalls.get_weight_version)
    start_profile = asynchronous(EngineCalls.start_profile)
    stop_profile = asynchronous(EngineCalls.stop_profile)


CALL_NAMES = frozenset(name for name in vars(EngineCalls) if not name.startswith("_"))
"""The names of all calls."""
