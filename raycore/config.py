"""The engine's configuration: frozen values, decided once.

Users give keyword arguments (`LLM(...)`, the command line); `resolve()` checks them, reads the checkpoint's
own `config.json`, fills in what was left open, and returns one `EngineConfig` that travels to every process.
Nothing else in raycore reads the environment or mutates a configuration. This file knows neither Ray nor torch.
"""

from __future__ import annotations

import logging
import math
import os
import re
from pathlib import Path
from typing import Any, Literal

import msgspec

from raycore.checkpoint.model_spec import ModelSpec, load_model_spec
from raycore.errors import InvalidConfig

DType = Literal["float32", "bfloat16", "float16"]
PlacementStrategy = Literal["strict", "fill", "span"]

DEFAULT_MAX_NUM_SEQS = 256
DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
DEFAULT_BLOCK_SIZE = 16
MAX_BLOCK_SIZE = 1024


class ModelConfig(msgspec.Struct, frozen=True):
    """What is run. Paths are absolute; `spec` is the checkpoint's own description."""

    model: str
    tokenizer: str
    spec: ModelSpec
    dtype: DType | Literal["auto"]
    """`auto` is decided by each worker, which knows its device: the checkpoint's, or float32 if the device lacks it."""
    max_model_len: int
    seed: int
    enforce_eager: bool
    """Kept for scripts that set it: nothing is compiled yet, so every model runs eagerly."""
    load_format: Literal["auto", "dummy"] = "auto"
    """`dummy` fills the weights with seeded random numbers instead of reading them."""
    batch_invariant: bool = False
    """Whether every token is computed with the same arithmetic whatever is beside it, so that its logits have the same
    bits alone, in a crowd, from a cached prefix, and after a preemption. Slower."""
    prepare_structured_outputs: bool = False
    """Whether clients and workers load what `structured_outputs` need while they start, and not with the first request
    that has them, which stops each of them for a second or two if the vocabulary is large."""

    @property
    def default_sampling_params(self) -> dict[str, Any]:
        """What the checkpoint's generation_config.json sets, by the names of `SamplingParams`."""
        known = dict(self.spec.generation_defaults)
        if "max_new_tokens" in known:
            known["max_tokens"] = known.pop("max_new_tokens")
        return known


class CacheConfig(msgspec.Struct, frozen=True):
    """The KV cache. A *block* holds `block_size` tokens of every layer of one rank."""

    block_size: int
    enable_prefix_caching: bool
    gpu_memory_utilization: float
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    """Bytes for each worker's share of the cache. None: profiled at startup."""


class SchedulerConfig(msgspec.Struct, frozen=True):
    """Limits of one step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: Literal["fcfs", "priority"] = "fcfs"
    long_prefill_token_threshold: int = 0
    """A prompt's chunk is at most this long; 0 means the token budget alone limits it."""


class ParallelConfig(msgspec.Struct, frozen=True):
    """The shape: `data_parallel_size` ranks of `tensor_parallel_size` workers each."""

    tensor_parallel_size: int
    data_parallel_size: int
    placement_strategy: PlacementStrategy = "fill"
    wait_for_nodes_s: float = 0.0
    """So long an autoscaler has to add nodes for ranks that have no place. 0: what the nodes that there are can never
    hold is refused at once."""
    worker_cls: str | None = None
    """`package.module.Class` of a `Worker` subclass; None is raycore's own."""
    enable_expert_parallel: bool = False
    """Whether experts are whole and spread over the workers of all ranks, rather than split within each rank."""
    dp_sync_interval: int = 1
    """Ranks in lockstep look for the end of their common work every so many steps."""

    @property
    def world_size(self) -> int:
        """Workers of one data-parallel rank."""
        return self.tensor_parallel_size

    @property
    def is_lockstep(self) -> bool:
        """Whether the data-parallel ranks need each other for every step, because they share experts."""
        return self.enable_expert_parallel and self.data_parallel_size > 1


class ExecutorConfig(msgspec.Struct, frozen=True):
    """How an engine drives its workers."""

    backend: Literal["inline", "ray"]
    transport: Literal["channel", "actor_call"] = "channel"
    wait: Literal["adaptive", "spin"] = "adaptive"
    """`adaptive` spins for `spin_window_s`, then sleeps until its doorbell rings; `spin` never sleeps."""
    spin_window_s: float = 100e-6
    channel_capacity_bytes: int = 1 << 20
    num_threads: int | None = None
    """Compute threads of one worker. None: the cores of the node over the workers on it."""
    init_timeout_s: float = 600.0
    execute_timeout_s: float = 300.0
    shutdown_timeout_s: float = 5.0


class RecoveryConfig(msgspec.Struct, frozen=True):
    """What is done about ranks that end, stall, or have to leave."""

    max_request_replays: int = 2
    """A request that was on a failing rank more often than this fails, alone."""
    step_timeout_s: float = 60.0
    """A rank with work whose step takes longer, or that doesn't answer for as long, is killed and replaced."""
    drain_timeout_s: float = 30.0
    """A rank that has to leave may finish what it has for this long; what is left then goes to others."""
    max_rank_restarts: int = 5
    """A rank that has to be started again more often within `restart_window_s` is given up."""
    restart_window_s: float = 300.0
    restart_backoff_s: float = 0.5
    """The pause before a second start within `crash_loop_s`; it doubles with each further one. The first has none."""
    crash_loop_s: float = 30.0
    max_restart_backoff_s: float = 30.0
    standby_delay_s: float | None = 8.0
    """So long after ranks have come up, processes start on their nodes that wait to take the place of one: memory for a
    much faster replacement. None: there are none."""
    placement_timeout_s: float = 60.0
    """How long one start may wait for resources that others hold."""


class EngineConfig(msgspec.Struct, frozen=True):
    """Everything an engine, its workers and its clients need to agree on."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    parallel: ParallelConfig
    executor: ExecutorConfig
    recovery: RecoveryConfig = RecoveryConfig()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` is decided once for an engine, when it starts, from the GPUs of the Ray cluster: workers never see it."""
    engine_name: str | None = None
    """By which others in the Ray cluster find the engine. None: a random one."""
    log_level: int = logging.WARNING
    """From which level on the processes of its ranks log."""

    def encode(self) -> bytes:
        """As bytes that `decode()` takes: what is handed to actors."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(data: bytes) -> EngineConfig:
        """The inverse of `encode()`."""
        return msgspec.msgpack.decode(data, type=EngineConfig)


def changes(old: EngineConfig, new: EngineConfig) -> list[str]:
    """What differs, as text such as `data_parallel_size=2, was 1`; empty if the two are equal."""
    found: list[str] = []
    for part in old.__struct_fields__:
        _note_changes(part, getattr(old, part), getattr(new, part), found)
    return found


def _note_changes(name: str, old: object, new: object, found: list[str]) -> None:
    if old == new:
        return
    if isinstance(old, ModelSpec):
        found.append("another config.json in the checkpoint")
    elif isinstance(old, msgspec.Struct):
        for field in old.__struct_fields__:
            _note_changes(field, getattr(old, field), getattr(new, field), found)
    else:
        found.append(f"{name}={new!r}, was {old!r}")


def resolve(
    model: str,
    tokenizer: str | None = None,
    *,
    dtype: str = "auto",
    seed: int = 0,
    max_model_len: int | None = None,
    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS,
    max_num_batched_tokens: int = DEFAULT_MAX_NUM_BATCHED_TOKENS,
    block_size: int = DEFAULT_BLOCK_SIZE,
    num_gpu_blocks_override: int | None = None,
    kv_cache_memory_bytes: int | None = None,
    gpu_memory_utilization: float = 0.9,
    enable_prefix_caching: bool = True,
    enforce_eager: bool = True,
    load_format: str = "auto",
    batch_invariant: bool = False,
    prepare_structured_outputs: bool = False,
    tensor_parallel_size: int = 1,
    data_parallel_size: int = 1,
    enable_expert_parallel: bool = False,
    dp_sync_interval: int = 1,
    placement_strategy: str = "fill",
    wait_for_nodes_s: float = 0.0,
    worker_cls: str | type | None = None,
    executor_backend: str | None = None,
    executor_transport: str = "channel",
    executor_wait: str = "adaptive",
    num_threads: int | None = None,
    scheduling_policy: str = "fcfs",
    long_prefill_token_threshold: int = 0,
    device: str = "auto",
    init_timeout_s: float = 600.0,
    max_request_replays: int = 2,
    max_rank_restarts: int = 5,
    restart_backoff_s: float = 0.5,
    step_timeout_s: float = 60.0,
    drain_timeout_s: float = 30.0,
    standby_delay_s: float | None = 8.0,
    engine_name: str | None = None,
) -> EngineConfig:
    """Check the options, read the checkpoint's description, and decide what was left open.

    Raises:
        InvalidConfig: an option, named with its value, can't work, or two contradict each other.
        InvalidCheckpoint: `model` isn't a checkpoint that raycore runs.
    """
    for name, value in (
        ("max_num_seqs", max_num_seqs),
        ("max_num_batched_tokens", max_num_batched_tokens),
        ("block_size", block_size),
        ("tensor_parallel_size", tensor_parallel_size),
        ("data_parallel_size", data_parallel_size),
        ("dp_sync_interval", dp_sync_interval),
    ):
        _require_positive(name, value)
    for name, value in (
        ("max_model_len", max_model_len),
        ("num_gpu_blocks_override", num_gpu_blocks_override),
        ("kv_cache_memory_bytes", kv_cache_memory_bytes),
        ("num_threads", num_threads),
    ):
        if value is not None:
            _require_positive(name, value)
    if block_size > MAX_BLOCK_SIZE:
        raise InvalidConfig(f"block_size={block_size} is above the largest supported, {MAX_BLOCK_SIZE}")
    if not 0.0 < gpu_memory_utilization <= 1.0:
        raise InvalidConfig(f"gpu_memory_utilization={gpu_memory_utilization} is not in (0, 1]")
    if long_prefill_token_threshold < 0:
        raise InvalidConfig(f"long_prefill_token_threshold={long_prefill_token_threshold} is negative")
    for name, value in (("max_request_replays", max_request_replays), ("max_rank_restarts", max_rank_restarts)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidConfig(f"{name}={value!r} is not a whole number, 0 or above")
    for name, value in (("init_timeout_s", init_timeout_s), ("step_timeout_s", step_timeout_s)):
        if not value > 0:
            raise InvalidConfig(f"{name}={value!r} is not positive")
    if not isinstance(wait_for_nodes_s, (int, float)) or not 0 <= wait_for_nodes_s < math.inf:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidConfig(f"wait_for_nodes_s={wait_for_nodes_s!r}: give seconds; 0 waits for none")
    if standby_delay_s is not None and not standby_delay_s >= 0:
        raise InvalidConfig(f"standby_delay_s={standby_delay_s!r} is negative: give seconds, or None for no standbys")
    for name, value in (("drain_timeout_s", drain_timeout_s), ("restart_backoff_s", restart_backoff_s)):
        if not value >= 0:
            raise InvalidConfig(f"{name}={value!r} is negative")
    if engine_name is not None and not re.fullmatch(r"[\w.-]+", engine_name, re.ASCII):
        raise InvalidConfig(f"engine_name={engine_name!r}: use letters, digits, '-', '_' and '.'")
    if isinstance(seed, bool) or not isinstance(seed, int):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidConfig(f"seed={seed!r} is not an integer")
    dtype = str(dtype).removeprefix("torch.")  # a torch.dtype is welcome too
    dtype = {"float": "float32", "half": "float16"}.get(dtype, dtype)
    _require_choice("dtype", dtype, ("auto", "float32", "bfloat16", "float16"))
    _require_choice("load_format", load_format, ("auto", "dummy"))
    _require_choice("placement_strategy", placement_strategy, ("strict", "fill", "span"))
    _require_choice("executor_backend", executor_backend, (None, "inline", "ray"))
    _require_choice("executor_transport", executor_transport, ("channel", "actor_call"))
    _require_choice("executor_wait", executor_wait, ("adaptive", "spin"))
    _require_choice("scheduling_policy", scheduling_policy, ("fcfs", "priority"))
    _require_choice("device", device, ("auto", "cpu", "cuda"))
    if executor_backend == "inline" and tensor_parallel_size > 1:
        raise InvalidConfig(
            f"executor_backend='inline' runs one worker in the engine's process, but "
            f"tensor_parallel_size={tensor_parallel_size} needs {tensor_parallel_size}: use executor_backend='ray'"
        )

    path = Path(model).expanduser()
    spec = load_model_spec(path)
    if enable_expert_parallel and spec.moe is None:
        raise InvalidConfig(
            f"enable_expert_parallel=True, but {path} is a {spec.architecture} without experts: omit it"
        )
    spec.check_tensor_parallel(tensor_parallel_size, enable_expert_parallel)
    length = _model_length(max_model_len, spec)
    if max_num_batched_tokens < max_num_seqs:
        raise InvalidConfig(
            f"max_num_batched_tokens={max_num_batched_tokens} is below max_num_seqs={max_num_seqs}: "
            "a step could not hold one token of every running request"
        )
    return EngineConfig(
        model=ModelConfig(
            model=os.path.abspath(path),
            tokenizer=os.path.abspath(Path(tokenizer).expanduser()) if tokenizer else os.path.abspath(path),
            spec=spec,
            dtype=dtype,  # pyright: ignore[reportArgumentType]  # checked above
            max_model_len=length,
            seed=seed,
            enforce_eager=enforce_eager,
            load_format=load_format,  # pyright: ignore[reportArgumentType]
            batch_invariant=batch_invariant,
            prepare_structured_outputs=prepare_structured_outputs,
        ),
        cache=CacheConfig(
            block_size=block_size,
            enable_prefix_caching=enable_prefix_caching,
            gpu_memory_utilization=gpu_memory_utilization,
            num_gpu_blocks_override=num_gpu_blocks_override,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=length,
            policy=scheduling_policy,  # pyright: ignore[reportArgumentType]
            long_prefill_token_threshold=long_prefill_token_threshold,
        ),
        parallel=ParallelConfig(
            tensor_parallel_size=tensor_parallel_size,
            data_parallel_size=data_parallel_size,
            placement_strategy=placement_strategy,  # pyright: ignore[reportArgumentType]
            wait_for_nodes_s=float(wait_for_nodes_s),
            worker_cls=_class_path(worker_cls),
            enable_expert_parallel=enable_expert_parallel,
            dp_sync_interval=dp_sync_interval,
        ),
        executor=ExecutorConfig(
            backend=executor_backend or ("inline" if tensor_parallel_size == 1 else "ray"),  # pyright: ignore[reportArgumentType]
            transport=executor_transport,  # pyright: ignore[reportArgumentType]
            wait=executor_wait,  # pyright: ignore[reportArgumentType]
            num_threads=num_threads,
            init_timeout_s=init_timeout_s,
        ),
        recovery=RecoveryConfig(
            max_request_replays=max_request_replays,
            max_rank_restarts=max_rank_restarts,
            restart_backoff_s=restart_backoff_s,
            step_timeout_s=step_timeout_s,
            drain_timeout_s=drain_timeout_s,
            standby_delay_s=standby_delay_s,
        ),
        device=device,  # pyright: ignore[reportArgumentType]
        engine_name=engine_name,
    )


def _require_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidConfig(f"{name}={value!r} is not an integer")
    if value <= 0:
        raise InvalidConfig(f"{name}={value} is not positive")


def _require_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise InvalidConfig(f"{name}={value!r} is none of {', '.join(map(repr, choices))}")


def _model_length(asked: int | None, spec: ModelSpec) -> int:
    if asked is None:
        return spec.max_length
    if asked > spec.max_length:
        raise InvalidConfig(
            f"max_model_len={asked} is above the {spec.max_length} positions that the checkpoint was "
            "made for (max_position_embeddings in its config.json)"
        )
    return asked


def _class_path(worker_cls: str | type | None) -> str | None:
    path = f"{worker_cls.__module__}.{worker_cls.__qualname__}" if isinstance(worker_cls, type) else worker_cls
    if path is not None and (path.startswith("__main__.") or "<locals>" in path):
        raise InvalidConfig(
            f"worker_cls={path!r} can't be imported by a worker's process: define the class at the top of a module"
        )
    return path
