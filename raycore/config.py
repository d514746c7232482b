"""The engine's configuration: frozen values, decided once.

Users give keyword arguments (`LLM(...)`, the command line); `resolve()` checks them, reads the checkpoint's
own `config.json`, fills in what was left open, and returns one `EngineConfig` that travels to every process.
Each option is declared here, once, by an `option(...)` at its field: see `raycore.options`.
Nothing else in raycore reads the environment or mutates a configuration. This file knows neither Ray nor torch.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from raycore.checkpoint.model_spec import ModelSpec, load_model_spec
from raycore.errors import InvalidConfig
from raycore.options import check_options, option, options_of, with_options
from raycore.vllm_options import without_vllm_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from raycore.option_types import EngineOptions

DType = Literal["float32", "bfloat16", "float16"]
PlacementStrategy = Literal["strict", "fill", "span"]

DEFAULT_MAX_NUM_SEQS = 256
DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
MAX_BLOCK_SIZE = 1024

_Count = Annotated[int, Meta(ge=1)]
_Seconds = Annotated[float, Meta(ge=0)]
_Timeout = Annotated[float, Meta(gt=0)]

_PartT = TypeVar("_PartT", bound=msgspec.Struct)


def _path(path: str | os.PathLike[str]) -> str:
    return path if isinstance(path, str) else os.fspath(path)


def _dtype_name(dtype: str | Any) -> str:
    """A `torch.dtype` is welcome, and so are torch's other names."""
    name = str(dtype).removeprefix("torch.")
    return {"float": "float32", "half": "float16"}.get(name, name)


def _class_path(worker_cls: str | type[Any] | None) -> str | None:
    path = f"{worker_cls.__module__}.{worker_cls.__qualname__}" if isinstance(worker_cls, type) else worker_cls
    if isinstance(path, str) and (path.startswith("__main__.") or "<locals>" in path):
        raise InvalidConfig(
            f"worker_cls={path!r} can't be imported by a worker's process: define the class at the top of a module"
        )
    return path


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What is run. Paths are absolute; `spec` is the checkpoint's own description."""

    model: Annotated[
        str,
        option(
            "A Hugging Face checkpoint's directory, which is the same on all nodes.",
            metavar="DIR",
            default="the bundled model",
            convert=_path,
        ),
    ]
    tokenizer: Annotated[str, option("The tokenizer's directory.", metavar="DIR", default="the model's", convert=_path)]
    spec: ModelSpec
    dtype: Annotated[
        Literal["auto"] | DType,
        option(
            "Numbers that weights and activations are computed in. auto: the checkpoint's, or float32 where the "
            "device lacks it, as each worker finds.",
            convert=_dtype_name,
        ),
    ] = "auto"
    max_model_len: Annotated[
        int,
        Meta(ge=1),
        option(
            "Tokens of a prompt and its output together, at most.", default="as many as the checkpoint has positions"
        ),
    ]
    seed: Annotated[
        int,
        Meta(ge=-(2**63), le=2**63 - 1),
        option(
            "Seed of the requests that have none of their own.",
            flags=("--seed", "--engine-seed"),
            expected="a 64-bit integer",
        ),
    ] = 0
    enforce_eager: Annotated[
        bool, option("Has no effect: nothing is compiled yet, so every model runs eagerly. For vLLM's scripts.")
    ] = True
    load_format: Annotated[
        Literal["auto", "dummy"],
        option("dummy: fill the weights with seeded random numbers instead of reading them."),
    ] = "auto"
    batch_invariant: Annotated[
        bool,
        option(
            "Compute every token with the same arithmetic whatever else is in its batch: its logits have the same bits "
            "alone, in a crowd, from a cached prefix, and after a preemption. Slower."
        ),
    ] = False
    prepare_structured_outputs: Annotated[
        bool,
        option(
            "Load what structured outputs need at startup. Otherwise the first request that has them stops each client "
            "and worker for a second or two if the vocabulary is large."
        ),
    ] = False

    @property
    def default_sampling_params(self) -> dict[str, Any]:
        """What the checkpoint's generation_config.json sets, by the names of `SamplingParams`."""
        known = dict(self.spec.generation_defaults)
        if "max_new_tokens" in known:
            known["max_tokens"] = known.pop("max_new_tokens")
        return known


class CacheConfig(msgspec.Struct, frozen=True):
    """The KV cache. A *block* holds `block_size` tokens of every layer of one rank."""

    block_size: Annotated[int, Meta(ge=1, le=MAX_BLOCK_SIZE), option("Tokens in a block of the KV cache.")] = 16
    enable_prefix_caching: Annotated[
        bool, option("Keep the KV cache of prompts, for prompts that begin in the same way.")
    ] = True
    gpu_memory_utilization: Annotated[
        float,
        Meta(gt=0, le=1),
        option("Share of the device's memory for weights and KV cache together.", metavar="SHARE"),
    ] = 0.9
    num_gpu_blocks_override: Annotated[_Count | None, option("Blocks of the KV cache.", default="as many as fit")] = (
        None
    )
    kv_cache_memory_bytes: Annotated[
        _Count | None, option("Bytes of each worker's share of the KV cache.", default="profiled at startup")
    ] = None


class SchedulerConfig(msgspec.Struct, frozen=True):
    """Limits of one step."""

    max_num_seqs: Annotated[
        int,
        Meta(ge=1),
        option(
            "Sequences that one rank runs at a time, at most.",
            default=f"{DEFAULT_MAX_NUM_SEQS}, or max_num_batched_tokens if that is less",
        ),
    ]
    max_num_batched_tokens: Annotated[
        int,
        Meta(ge=1),
        option(
            "Tokens that one rank computes in a step, at most.",
            default=f"{DEFAULT_MAX_NUM_BATCHED_TOKENS}, or max_num_seqs if that is more",
        ),
    ]
    max_model_len: int
    policy: Annotated[
        Literal["fcfs", "priority"],
        option(
            "Which waiting request runs next. fcfs: the first that came. priority: the one with the lowest number.",
            name="scheduling_policy",
        ),
    ] = "fcfs"
    long_prefill_token_threshold: Annotated[
        int,
        Meta(ge=0),
        option("Tokens of one prompt in a step, at most. 0: only max_num_batched_tokens limits them."),
    ] = 0


class ParallelConfig(msgspec.Struct, frozen=True):
    """The shape: `data_parallel_size` ranks of `tensor_parallel_size` workers each."""

    tensor_parallel_size: Annotated[
        int, Meta(ge=1), option("Workers of each rank, which split the model.", flags=("-tp", "--tensor-parallel-size"))
    ] = 1
    data_parallel_size: Annotated[
        int, Meta(ge=1), option("Ranks: copies of the model.", flags=("-dp", "--data-parallel-size"))
    ] = 1
    placement_strategy: Annotated[
        PlacementStrategy,
        option(
            "How ranks are placed on nodes. strict: no rank spans nodes, and every node in use has the same number of "
            "ranks. fill: no rank spans nodes, and one node is filled after the other. span: as fill, but a rank that "
            "no node can hold is spread over several."
        ),
    ] = "fill"
    wait_for_nodes_s: Annotated[
        _Seconds,
        option(
            "Seconds to wait for an autoscaler to add nodes. 0: fail at once if the cluster can never fit the ranks.",
            flags=("--wait-for-nodes", "--wait-for-nodes-s"),
        ),
    ] = 0.0
    worker_cls: Annotated[
        str | None,
        option(
            "package.module.Class of a Worker subclass.",
            metavar="CLASS",
            default="raycore's own",
            expected="a class, or its package.module.Class",
            convert=_class_path,
        ),
    ] = None
    enable_expert_parallel: Annotated[
        bool, option("Spread whole experts over the workers of all ranks, instead of splitting each within its rank.")
    ] = False
    dp_sync_interval: Annotated[
        int, Meta(ge=1), option("Steps between two looks of ranks that share experts for the end of their common work.")
    ] = 1

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

    backend: Annotated[
        Literal["inline", "ray"],
        option(
            "Where workers run. inline: the only worker of a rank in the engine's process. ray: each in an actor.",
            name="executor_backend",
            default="inline if tensor_parallel_size is 1, else ray",
        ),
    ]
    transport: Annotated[
        Literal["channel", "actor_call"],
        option(
            "How an engine calls its workers. channel: through shared memory. actor_call: with calls of Ray's.",
            name="executor_transport",
        ),
    ] = "channel"
    wait: Annotated[
        Literal["adaptive", "spin"],
        option(
            "How processes wait at a channel. adaptive: spin for spin_window_s, then sleep. spin: never sleep.",
            name="executor_wait",
        ),
    ] = "adaptive"
    spin_window_s: Annotated[_Seconds, option("Seconds that a process spins at a channel before it sleeps.")] = 100e-6
    channel_capacity_bytes: Annotated[
        int, Meta(ge=4096), option("Bytes that a channel holds. A larger message is sent in parts.")
    ] = 1 << 20
    num_threads: Annotated[
        _Count | None,
        option("Compute threads of each worker.", default="the cores of its node over the workers there"),
    ] = None
    init_timeout_s: Annotated[
        _Timeout, option("Seconds for a rank to come up, weights and all. It fails after that.")
    ] = 600.0
    execute_timeout_s: Annotated[
        _Timeout, option("Seconds for the workers' reply to one call, such as a step. The rank fails after that.")
    ] = 300.0
    shutdown_timeout_s: Annotated[
        _Seconds,
        option(
            "Seconds for workers to stop when the engine does. They are killed after that.",
            flags=("--worker-shutdown-timeout-s",),
        ),
    ] = 5.0


class RecoveryConfig(msgspec.Struct, frozen=True):
    """What is done about ranks that end, stall, or have to leave."""

    max_request_replays: Annotated[
        int,
        Meta(ge=0),
        option("How often a request may go on elsewhere after its rank has failed. It fails alone, the next time."),
    ] = 2
    step_timeout_s: Annotated[
        _Timeout,
        option(
            "Seconds for one step. A rank that takes longer, or does not answer for as long, is killed and replaced."
        ),
    ] = 60.0
    drain_timeout_s: Annotated[
        _Seconds,
        option(
            "Seconds in which a rank that has to leave may finish its requests. Others go on with what is left.",
            flags=("--rank-drain-timeout-s",),
        ),
    ] = 30.0
    max_rank_restarts: Annotated[
        int, Meta(ge=0), option("How often a rank may be started again within restart_window_s before it is given up.")
    ] = 5
    restart_window_s: Annotated[_Timeout, option("Seconds over which the starts of a rank are counted.")] = 300.0
    restart_backoff_s: Annotated[
        _Seconds,
        option(
            "Seconds before the second start of a rank within crash_loop_s. They double with each further one. The "
            "first start is at once."
        ),
    ] = 0.5
    crash_loop_s: Annotated[_Seconds, option("Seconds within which starts of a rank are taken for a crash loop.")] = (
        30.0
    )
    max_restart_backoff_s: Annotated[_Seconds, option("Seconds between two starts of a rank, at most.")] = 30.0
    standby_delay_s: Annotated[
        _Seconds | None,
        option(
            "Seconds after which standby processes start beside ranks that have come up. They cost memory, and make "
            "replacing a rank much faster. None: no standbys."
        ),
    ] = 8.0
    placement_timeout_s: Annotated[
        _Timeout, option("Seconds to wait for resources that others hold, when ranks are placed.")
    ] = 60.0


class EngineConfig(msgspec.Struct, frozen=True):
    """Everything an engine, its workers and its clients need to agree on."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    parallel: ParallelConfig
    executor: ExecutorConfig
    recovery: RecoveryConfig = RecoveryConfig()
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        option(
            "What workers compute on. auto: the CPU until the GPU path has been tested on GPUs, with a warning if the "
            "cluster has GPUs."
        ),
    ] = "auto"
    """`auto` is decided once for an engine, when it starts, from the GPUs of the Ray cluster: workers never see it."""
    engine_name: Annotated[
        Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_.-]+\Z")] | None,
        option(
            "Name by which `raycore status` and `raycore scale` find the engine.",
            default="a random one",
            expected="a name of letters, digits, '-', '_' and '.'",
        ),
    ] = None
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


_PARTS: tuple[tuple[type[msgspec.Struct], str], ...] = (
    (ModelConfig, "Model"),
    (EngineConfig, "Engine"),
    (ParallelConfig, "Parallelism and placement"),
    (CacheConfig, "KV cache"),
    (SchedulerConfig, "Scheduler"),
    (ExecutorConfig, "Workers"),
    (RecoveryConfig, "Recovery"),
)

ENGINE_OPTIONS = {each.name: each for part, group in _PARTS for each in options_of(part, group)}
"""All options of an engine, by keyword."""


@with_options(ENGINE_OPTIONS)
def resolve(
    model: str | os.PathLike[str], tokenizer: str | os.PathLike[str] | None = None, **options: Unpack[EngineOptions]
) -> EngineConfig:
    """Check the options, read the checkpoint's description, and decide what was left open.

    Args:
        options: those of `ENGINE_OPTIONS`, with types, ranges and defaults in docs/options.md. None is the default,
            where it isn't a value of its own.

    Raises:
        InvalidConfig: an option, named with its value, can't work, or two contradict each other.
        InvalidCheckpoint: `model` isn't a checkpoint that raycore runs.
    """
    given = check_options(ENGINE_OPTIONS, without_vllm_options({"model": model, "tokenizer": tokenizer, **options}))
    chosen: dict[str, Any] = {
        name: value for name, value in given.items() if value is not None or not ENGINE_OPTIONS[name].is_open
    }
    path = Path(chosen["model"]).expanduser()
    tensor_parallel_size: int = chosen.get("tensor_parallel_size", 1)
    backend = _executor_backend(chosen.get("executor_backend"), tensor_parallel_size)
    spec = load_model_spec(path)
    has_expert_parallel: bool = chosen.get("enable_expert_parallel", False)
    if has_expert_parallel and spec.moe is None:
        raise InvalidConfig(
            f"enable_expert_parallel=True, but {path} is a {spec.architecture} without experts: omit it"
        )
    spec.check_tensor_parallel(tensor_parallel_size, has_expert_parallel)
    length = _model_length(chosen.get("max_model_len"), spec)
    num_seqs, num_tokens = _step_limits(chosen.get("max_num_seqs"), chosen.get("max_num_batched_tokens"))
    return _part(
        EngineConfig,
        chosen,
        model=_part(
            ModelConfig,
            chosen,
            model=os.path.abspath(path),
            tokenizer=os.path.abspath(Path(chosen.get("tokenizer", path)).expanduser()),
            spec=spec,
            max_model_len=length,
        ),
        cache=_part(CacheConfig, chosen),
        scheduler=_part(
            SchedulerConfig, chosen, max_num_seqs=num_seqs, max_num_batched_tokens=num_tokens, max_model_len=length
        ),
        parallel=_part(ParallelConfig, chosen),
        executor=_part(ExecutorConfig, chosen, backend=backend),
        recovery=_part(RecoveryConfig, chosen),
    )


def _part(struct: type[_PartT], chosen: dict[str, Any], **decided: Any) -> _PartT:
    """A part of the configuration: its options as chosen, and what was decided from them."""
    fields = {each.field: chosen[each.name] for each in options_of(struct, "") if each.name in chosen}
    return struct(**fields | decided)


def _executor_backend(asked: str | None, tensor_parallel_size: int) -> str:
    if asked == "inline" and tensor_parallel_size > 1:
        raise InvalidConfig(
            f"executor_backend='inline' runs one worker in the engine's process, but "
            f"tensor_parallel_size={tensor_parallel_size} needs {tensor_parallel_size}: use executor_backend='ray'"
        )
    return asked or ("inline" if tensor_parallel_size == 1 else "ray")


def _step_limits(num_seqs: int | None, num_tokens: int | None) -> tuple[int, int]:
    """`max_num_seqs` and `max_num_batched_tokens`: a default gives way to the one that was chosen."""
    if num_seqs is None:
        num_tokens = DEFAULT_MAX_NUM_BATCHED_TOKENS if num_tokens is None else num_tokens
        return min(DEFAULT_MAX_NUM_SEQS, num_tokens), num_tokens
    if num_tokens is None:
        return num_seqs, max(DEFAULT_MAX_NUM_BATCHED_TOKENS, num_seqs)
    if num_tokens < num_seqs:
        raise InvalidConfig(
            f"max_num_batched_tokens={num_tokens} is below max_num_seqs={num_seqs}: "
            "a step could not hold one token of every running request"
        )
    return num_seqs, num_tokens


def _model_length(asked: int | None, spec: ModelSpec) -> int:
    if asked is None:
        return spec.max_length
    if asked > spec.max_length:
        raise InvalidConfig(
            f"max_model_len={asked} is above the {spec.max_length} positions that the checkpoint was "
            "made for (max_position_embeddings in its config.json)"
        )
    return asked
