"""The engine's configuration: immutable, and resolved once.

Users pass keyword arguments to `LLM(...)`, or flags. `resolve()` checks them, reads the checkpoint's `config.json`,
computes the values that were not given, and returns one `EngineConfig`, which every process of the engine gets.
Each option is declared once, by an `option(...)` at its field: see `raycore.options`.
This module imports neither Ray nor torch.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from raycore.checkpoint.hub_cache import find_directory
from raycore.checkpoint.sharded_state import (
    Division,
    check_saved_state,
    checked_pattern,
    parse_loader_config,
)
from raycore.checkpoint.stages import Stage, split_layers
from raycore.checkpoint.stored_model import fit_model
from raycore.checkpoint.weight_files import has_weight_files, stored_tensors
from raycore.class_paths import as_class_path
from raycore.drafter_config import DrafterConfig, resolve_drafter
from raycore.errors import InitializationError, InvalidConfig
from raycore.models.registry import load_model_spec
from raycore.models.spec import ModelSpec
from raycore.options import check_options, option, options_of, with_options
from raycore.plugins import Plugins, find_plugins, load_general_plugins
from raycore.profiler_config import ProfilerConfig, parse_profiler_config
from raycore.same_copy import seal, unseal
from raycore.speculative_config import SpeculativeConfig, parse_speculative_config
from raycore.vllm_table import without_vllm_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from raycore.option_types import EngineOptions

DType = Literal["float32", "bfloat16", "float16"]
PlacementStrategy = Literal["strict", "fill", "span"]

DEFAULT_MAX_NUM_SEQS = 256
DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
MAX_BLOCK_SIZE = 1024
MAX_STAGES = 64
"""Limited by the board of an engine (see `raycore.rpc.doorbell`)."""

_Count = Annotated[int, Meta(ge=1)]
_Seconds = Annotated[float, Meta(ge=0)]
_Timeout = Annotated[float, Meta(gt=0)]

_PartT = TypeVar("_PartT", bound=msgspec.Struct)


def _path(path: str | os.PathLike[str]) -> str:
    return path if isinstance(path, str) else os.fspath(path)


def _dtype_name(dtype: str | Any) -> str:
    """Convert a dtype, given as a `torch.dtype` or by one of torch's names, to the name that the option accepts.

    For example, `torch.float32` and `"float"` become `"float32"`.
    """
    name = str(dtype).removeprefix("torch.")
    return {"float": "float32", "half": "float16"}.get(name, name)


def _worker_path(worker_cls: str | type[Any] | None) -> str | None:
    return as_class_path("worker_cls", worker_cls)


def _scheduler_path(scheduler_cls: str | type[Any] | None) -> str | None:
    return as_class_path("scheduler_cls", scheduler_cls)


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The model and how it is loaded. Paths are absolute. `spec` holds what the checkpoint's config.json describes."""

    model: Annotated[
        str,
        option(
            "Directory of a Hugging Face checkpoint, or its name on the hub if `hf download` has put it into the "
            "cache. The path must be the same on all nodes.",
            metavar="DIR",
            default="the bundled model",
            convert=_path,
        ),
    ]
    tokenizer: Annotated[
        str,
        option(
            "Directory of the tokenizer, or its name on the hub.", metavar="DIR", default="the model's", convert=_path
        ),
    ]
    spec: ModelSpec
    revision: Annotated[
        str | None,
        option("The branch, tag or commit of a model that is named as on the hub.", default="main"),
    ] = None
    tokenizer_revision: Annotated[
        str | None,
        option("The branch, tag or commit of a tokenizer that is named as on the hub.", default="main"),
    ] = None
    download_dir: Annotated[
        str | None,
        option(
            "Directory of the Hugging Face cache where models are looked up.",
            metavar="DIR",
            default="that of the variables HF_HUB_CACHE and HF_HOME",
        ),
    ] = None
    dtype: Annotated[
        Literal["auto"] | DType,
        option(
            "Data type of weights and activations. auto: the checkpoint's data type. If the first rank's device has no "
            "instructions for that, all ranks use float32 on CPUs and float16 on GPUs.",
            convert=_dtype_name,
        ),
    ] = "auto"
    max_model_len: Annotated[
        int,
        Meta(ge=1),
        option(
            "Maximum length of a sequence in tokens: prompt and output together.", default="the checkpoint's maximum"
        ),
    ]
    seed: Annotated[
        int,
        Meta(ge=-(2**63), le=2**63 - 1),
        option(
            "Requests without a seed get different seeds, which are derived from this one.",
            flags=("--seed", "--engine-seed"),
            expected="a 64-bit integer",
        ),
    ] = 0
    enforce_eager: Annotated[
        bool,
        option(
            "On a GPU: launch every kernel of a step by itself, instead of capturing the steps that only decode in "
            "CUDA graphs. Slower, and takes less memory."
        ),
    ] = False
    attention_backend: Annotated[
        Literal["auto", "triton", "native", "torch"],
        option(
            "What computes attention, and the operations around it. triton: raycore's kernels for GPUs. native: "
            "raycore's kernels for CPUs. torch: plain PyTorch, on any device, slower. auto: the fastest of these that "
            "can be used. Where only the model's attention has a part that kernels lack, the operations around it keep "
            "theirs."
        ),
    ] = "auto"
    load_format: Annotated[
        Literal["auto", "dummy", "sharded_state"],
        option(
            "auto: read the weights from the checkpoint. dummy: use random weights, generated from the engine's seed. "
            "sharded_state: read the files that save_sharded_state() has written, with the same parallel sizes."
        ),
    ] = "auto"
    model_loader_extra_config: Annotated[
        dict[str, str] | None,
        option(
            'With load_format=sharded_state: {"pattern": "..."} if the files were saved with another pattern.',
            metavar="JSON",
            expected="a dict or a JSON object",
            convert=parse_loader_config,
        ),
    ] = None
    quantization: Annotated[
        Literal["fp8", "int8"] | None,
        option(
            "fp8: the weights of linear layers are rounded to 8 bits while they are loaded, and activations while they "
            "are computed. This halves the weights' memory. It needs a GPU with compute capability 8.9 or more, and "
            "can't be used with batch_invariant. int8: the same with integers, on CPUs, with the native kernels. "
            "Neither is for mixture-of-experts models. Embeddings and the head keep the data type. "
            "Quantized checkpoints need no option: weights are kept as they are where the device computes with them "
            "(fp8 on GPUs, integers on CPUs), and converted to the data type elsewhere.",
            flags=("-q", "--quantization"),
        ),
    ] = None
    batch_invariant: Annotated[
        bool,
        option(
            "Make a token's logits bitwise independent of the other requests in its batch, of prefix caching and of "
            "preemption. Slower."
        ),
    ] = False
    prepare_structured_outputs: Annotated[
        bool,
        option(
            "Load what structured outputs need at startup. Otherwise the first request that uses them stalls the "
            "processes that handle it, with all their requests, for a second or two if the vocabulary is large."
        ),
    ] = False

    @property
    def default_sampling_params(self) -> dict[str, Any]:
        """The sampling parameters that the checkpoint's generation_config.json sets, by their names in
        `SamplingParams`."""
        known = dict(self.spec.generation_defaults)
        if "max_new_tokens" in known:
            known["max_tokens"] = known.pop("max_new_tokens")
        return known


CACHE_BACKENDS: dict[str, Literal["native", "triton"]] = {
    "int8_per_token_head": "native",
    "fp8": "triton",
    "fp8_e4m3": "triton",
}
"""The attention backend that each `kv_cache_dtype` but `auto` needs."""


class CacheConfig(msgspec.Struct, frozen=True):
    """The KV cache of each rank. A *block* holds the keys and values of `block_size` tokens, for all layers."""

    block_size: Annotated[int, Meta(ge=1, le=MAX_BLOCK_SIZE), option("Tokens in a block of the KV cache.")] = 16
    enable_prefix_caching: Annotated[
        bool, option("Reuse the KV cache of earlier requests for prompts with the same prefix.")
    ] = True
    gpu_memory_utilization: Annotated[
        float,
        Meta(gt=0, le=1),
        option(
            "On a GPU: fraction of its memory for weights, activations and KV cache. On a CPU: a worker's "
            "default KV cache is this fraction of half its equal share of the available memory, but at most 4 GiB.",
            flags=("--gpu-memory-utilization", "--device-memory-utilization"),
            metavar="FRACTION",
        ),
    ] = 0.9
    num_gpu_blocks_override: Annotated[
        _Count | None,
        option(
            "Number of blocks in each rank's KV cache, on CPUs too. Takes precedence over kv_cache_memory_bytes.",
            default="as many as the cache's memory holds",
        ),
    ] = None
    kv_cache_memory_bytes: Annotated[
        _Count | None,
        option("KV cache size of each worker, in bytes.", default="computed from the free memory at startup"),
    ] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "int8_per_token_head", "fp8", "fp8_e4m3"],
        option(
            "What keys and values are stored in. auto: the data type. int8_per_token_head: integers of 8 bits, and a "
            "scale for each token and head, on CPUs, with the native kernels. fp8, or fp8_e4m3: floating-point numbers "
            "of 8 bits without scales, up to 448, on GPUs with compute capability 8.9 or more, with the Triton "
            "kernels. 8 bits halve the cache's memory, and what steps read of it, for small errors in the logits. "
            "Applies to the caches of draft models, too."
        ),
    ] = "auto"

    def check_memory(self, num_workers: int, total: int | None, where: str, bytes_per_block: int | None = None) -> None:
        """Check that caches aren't larger than the memory, before anything is read into it.

        Args:
            num_workers: how many workers share the memory.
            total: its size in bytes. None: unknown.
            where: what the error calls it.
            bytes_per_block: None: unknown yet.

        Raises:
            InvalidConfig: they are larger.
        """
        num_blocks, num_bytes = self.num_gpu_blocks_override, self.kv_cache_memory_bytes
        asked = f"kv_cache_memory_bytes={num_bytes}"
        if num_blocks is not None:
            num_bytes = None if bytes_per_block is None else num_blocks * bytes_per_block
            asked = f"num_gpu_blocks_override={num_blocks} ({num_bytes} bytes)"
        if num_bytes is None or total is None or num_bytes * num_workers <= total:
            return
        each = "" if num_workers == 1 else f" for each of {num_workers} workers"
        raise InvalidConfig(
            f"{asked}{each} is more memory than {where} has: {total} bytes ({total / 2**30:.1f} GiB). Lower it, or "
            "omit it: the default fits into the memory that is free"
        )


class SchedulerConfig(msgspec.Struct, frozen=True):
    """The limits of a step, and the order in which requests are scheduled."""

    max_num_seqs: Annotated[
        int,
        Meta(ge=1),
        option(
            "Maximum number of sequences that a rank runs concurrently. At most max_num_batched_tokens.",
            default=f"{DEFAULT_MAX_NUM_SEQS}, or max_num_batched_tokens if that is less",
        ),
    ]
    max_num_batched_tokens: Annotated[
        int,
        Meta(ge=1),
        option(
            "Maximum number of tokens that a rank computes in one step.",
            default=f"{DEFAULT_MAX_NUM_BATCHED_TOKENS}, or max_num_seqs if that is more",
        ),
    ]
    max_model_len: int
    policy: Annotated[
        Literal["fcfs", "priority"],
        option(
            "Order in which waiting requests start. fcfs: first come, first served. priority: lowest `priority` of "
            "the request first.",
            name="scheduling_policy",
        ),
    ] = "fcfs"
    long_prefill_token_threshold: Annotated[
        int,
        Meta(ge=0),
        option("Maximum number of one prompt's tokens in a step. 0: limited only by max_num_batched_tokens."),
    ] = 0
    async_scheduling: Annotated[
        bool | None,
        option(
            "Plan and start the next step while the device still computes the last one. On CPUs this costs more than "
            "it saves. Ranks that share experts never do it. With several stages, one more step than there are stages "
            "is in flight.",
            default="True with device=cuda or several stages, else False",
        ),
    ] = None
    max_concurrent_batches: Annotated[
        _Count | None,
        option(
            "Number of steps that a rank may start before it takes the first one's result. More than 1 is async "
            "scheduling.",
            default="the number of stages; one more with async scheduling",
        ),
    ] = None
    scheduler_cls: Annotated[
        str | None,
        option(
            "A class to use instead of raycore's Scheduler, as package.module.Class, or the name of a plugin. It has "
            "the methods of raycore.scheduler.protocol.SchedulerProtocol. All nodes must be able to import it.",
            metavar="CLASS",
            default="raycore's Scheduler",
            expected="a class, or its package.module.Class",
            convert=_scheduler_path,
        ),
    ] = None


def _layer_counts(pipeline_layers: str | list[int]) -> str:
    """Convert a list of numbers to the form that the option has on the command line."""
    return ",".join(map(str, pipeline_layers)) if isinstance(pipeline_layers, list) else pipeline_layers


class ParallelConfig(msgspec.Struct, frozen=True):
    """`data_parallel_size` ranks, each with `tensor_parallel_size` workers in each of `pipeline_parallel_size` stages,
    and where they are placed."""

    tensor_parallel_size: Annotated[
        int,
        Meta(ge=1),
        option("Number of workers that each layer is split over.", flags=("-tp", "--tensor-parallel-size")),
    ] = 1
    data_parallel_size: Annotated[
        int,
        Meta(ge=1),
        option("Number of ranks. Each has its own copy of the model.", flags=("-dp", "--data-parallel-size")),
    ] = 1
    placement_strategy: Annotated[
        PlacementStrategy,
        option(
            "How ranks are placed on nodes. strict: no rank spans nodes, and each node in use gets the same number of "
            "ranks. fill: no rank spans nodes, and nodes are filled one after the other. span: like fill, but a rank "
            "that no single node can hold is spread over several nodes."
        ),
    ] = "fill"
    wait_for_nodes_s: Annotated[
        _Seconds,
        option(
            "Seconds to wait for resources, for which an autoscaler may add nodes. Replaces the 10 seconds of scale() "
            "and, when an engine starts, placement_timeout_s. A rank that has lost its node waits for the longer of "
            "the two. 0: fail at once if the ranks would not fit on the present nodes even if these were idle.",
            flags=("--wait-for-nodes", "--wait-for-nodes-s"),
        ),
    ] = 0.0
    gpus_per_worker: Annotated[
        float,
        Meta(gt=0.0, le=1.0),
        option(
            "With device=cuda: the share of a GPU that a worker reserves. With less than 1, several workers share a "
            "GPU, and gpu_memory_utilization has to leave memory for the others.",
            metavar="FRACTION",
        ),
    ] = 1.0
    worker_cls: Annotated[
        str | None,
        option(
            "A subclass of raycore's Worker to use instead, as package.module.Class, or the name of a plugin. All "
            "nodes must be able to import it.",
            metavar="CLASS",
            default="raycore's Worker",
            expected="a class, or its package.module.Class",
            convert=_worker_path,
        ),
    ] = None
    enable_expert_parallel: Annotated[
        bool,
        option(
            "For mixture-of-experts models. All ranks share one set of experts, of which each worker holds some whole "
            "ones. Otherwise each rank has all experts, and splits each of them over its workers.",
            flags=("--enable-expert-parallel", "-ep"),
        ),
    ] = False
    dp_sync_interval: Annotated[
        int,
        Meta(ge=1),
        option("With expert parallelism: number of steps between two checks whether all ranks are idle."),
    ] = 1

    pipeline_parallel_size: Annotated[
        int,
        Meta(ge=1, le=MAX_STAGES),
        option(
            "Number of stages that the model's layers are divided over. Each stage has tensor_parallel_size workers. "
            "They compute at the same time, each another step, so a single request is no faster with stages.",
            flags=("-pp", "--pipeline-parallel-size"),
        ),
    ] = 1
    pipeline_layers: Annotated[
        Annotated[str, Meta(pattern=r"\A[0-9]{1,4}(,[0-9]{1,4})*\Z")] | None,
        option(
            "Number of layers of each stage, such as 15,17.",
            metavar="N,N",
            default="divided so that the largest stage has as few multiplications as possible",
            expected="numbers of layers, separated by commas",
            convert=_layer_counts,
        ),
    ] = None

    @property
    def world_size(self) -> int:
        """Number of workers of one data-parallel rank."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def stages(self, spec: ModelSpec) -> list[Stage]:
        """Return each stage's part of a model.

        Raises:
            InvalidConfig: there are more stages than layers, or `pipeline_layers` doesn't fit.
        """
        counts = None if self.pipeline_layers is None else [int(count) for count in self.pipeline_layers.split(",")]
        return split_layers(spec, self.pipeline_parallel_size, counts)

    @property
    def is_lockstep(self) -> bool:
        """Whether all data-parallel ranks run every step together, because they share the experts of the model."""
        return self.enable_expert_parallel and self.data_parallel_size > 1


class ExecutorConfig(msgspec.Struct, frozen=True):
    """Where a rank's workers run, how the rank's engine calls them, and the timeouts of these calls."""

    backend: Annotated[
        Literal["inline", "ray"],
        option(
            "Where workers run. inline: a rank's only worker runs in the rank's engine process. ray: each worker is a "
            "Ray actor.",
            name="executor_backend",
            default="inline if a rank has one worker, else ray",
        ),
    ]
    transport: Annotated[
        Literal["channel", "actor_call"],
        option(
            "How an engine calls its workers. channel: through Ray's shared-memory channels. actor_call: by Ray actor "
            "calls, which are slower.",
            name="executor_transport",
        ),
    ] = "channel"
    wait: Annotated[
        Literal["adaptive", "spin"],
        option(
            "How processes wait for a message on a channel. adaptive: spin for spin_window_s, then sleep. spin: never "
            "sleep, so that an idle worker keeps a core busy.",
            name="executor_wait",
        ),
    ] = "adaptive"
    spin_window_s: Annotated[_Seconds, option("Seconds that a process spins on a channel before it sleeps.")] = 100e-6
    channel_capacity_bytes: Annotated[
        int, Meta(ge=4096), option("Capacity of a channel, in bytes. Larger messages are sent in parts.")
    ] = 1 << 20
    num_threads: Annotated[
        _Count | None,
        option(
            "Maximum number of compute threads per worker, on CPUs. While other processes need cores, fewer are used.",
            default="the node's cores divided by the engine's workers on the node",
        ),
    ] = None
    init_timeout_s: Annotated[
        _Timeout,
        option(
            "Seconds within which ranks must start, including loading weights. Otherwise the start of the engine, or "
            "the restart of the rank, has failed."
        ),
    ] = 600.0
    execute_timeout_s: Annotated[
        _Timeout,
        option(
            "Seconds within which workers must reply to a call. A step that takes longer fails the rank, unless the "
            "shorter step_timeout_s has done so before. Other late calls raise RpcTimeout. Does not apply to inline "
            "workers."
        ),
    ] = 300.0
    shutdown_timeout_s: Annotated[
        _Seconds,
        option(
            "Seconds that ranks and their workers have to stop when the engine is shut down. Then they are killed.",
            flags=("--worker-shutdown-timeout-s",),
        ),
    ] = 5.0


class RecoveryConfig(msgspec.Struct, frozen=True):
    """What happens when ranks fail, stall or are removed."""

    max_request_replays: Annotated[
        int,
        Meta(ge=0),
        option(
            "Number of failures of its rank that a request survives: it continues on another rank, or on the failed "
            "rank's replacement. The next failure fails the request."
        ),
    ] = 2
    step_timeout_s: Annotated[
        _Timeout,
        option(
            "Maximum duration of a step in seconds. A rank with requests that takes longer, or does not respond for "
            "that long, is killed and replaced."
        ),
    ] = 60.0
    drain_timeout_s: Annotated[
        _Seconds,
        option(
            "Seconds that a rank has to finish its requests before it is removed by scale() or leaves a node that Ray "
            "drains. Unfinished requests move to other ranks.",
            flags=("--rank-drain-timeout-s",),
        ),
    ] = 30.0
    max_rank_restarts: Annotated[
        int,
        Meta(ge=0),
        option(
            "Maximum number of restarts of a rank within restart_window_s. A rank that would need more is given up for "
            "good. Once all ranks are given up, the engine fails."
        ),
    ] = 5
    restart_window_s: Annotated[_Timeout, option("Length in seconds of the sliding period for max_rank_restarts.")] = (
        300.0
    )
    restart_backoff_s: Annotated[
        _Seconds,
        option(
            "Delay in seconds before a rank is restarted for the second time within crash_loop_s. It doubles with each "
            "further restart within that period. The first restart is immediate."
        ),
    ] = 0.5
    crash_loop_s: Annotated[_Seconds, option("Length in seconds of the sliding period for restart_backoff_s.")] = 30.0
    max_restart_backoff_s: Annotated[_Seconds, option("Maximum delay in seconds before a restart.")] = 30.0
    standby_delay_s: Annotated[
        _Seconds | None,
        option(
            "Seconds after the ranks are ready at which standbys start: on each node with ranks, the idle processes of "
            "one rank. They use memory, and make replacing a rank faster. None (for the flag: none): no standbys. "
            "There are never any with expert parallelism over several ranks."
        ),
    ] = 8.0
    placement_timeout_s: Annotated[
        _Timeout,
        option(
            "Seconds to wait for resources that others in the cluster use, when an engine starts or a rank has lost "
            "its node. scale() waits 10 seconds whatever this is. See also wait_for_nodes_s."
        ),
    ] = 60.0


class LoRAConfig(msgspec.Struct, frozen=True):
    """Which LoRA adapters requests may use."""

    enable_lora: Annotated[
        bool, option("Let requests use LoRA adapters (lora_request). The other options of adapters need this one.")
    ] = False
    max_loras: Annotated[int, Meta(ge=1, le=1024), option("Maximum number of different adapters in a step.")] = 1
    max_lora_rank: Annotated[int, Meta(ge=1, le=1024), option("Maximum rank of an adapter.")] = 16
    max_cpu_loras: Annotated[
        Annotated[int, Meta(ge=1, le=65536)] | None,
        option(
            "Number of adapters that a worker holds. If another one is needed, the one that hasn't been used for the "
            "longest time makes room.",
            default="max_loras",
        ),
    ] = None

    @property
    def num_held(self) -> int:
        """Number of adapters that a worker holds."""
        return self.max_cpu_loras or self.max_loras

    @property
    def num_places(self) -> int:
        """Number of adapters that a worker has room for: one more, which replaces another that is still in use."""
        return self.num_held + 1


class EngineConfig(msgspec.Struct, frozen=True):
    """The configuration that an engine, its workers and its clients share."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    parallel: ParallelConfig
    executor: ExecutorConfig
    recovery: RecoveryConfig = RecoveryConfig()
    lora: LoRAConfig = LoRAConfig()
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        option(
            "Device that workers compute on. auto: cuda if the cluster has GPUs and torch is built with CUDA, else cpu."
        ),
    ] = "auto"
    """Ranks and workers get `cpu` or `cuda`: `auto` is resolved once, when the engine starts."""
    engine_name: Annotated[
        Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_.-]+\Z")] | None,
        option(
            "Name of the engine, for `raycore status --name` and `raycore scale --name`. A second engine with the same "
            "name is refused in the same Ray cluster. Ray Serve adds each replica's id.",
            default="random",
            expected="a name of letters, digits, '-', '_' and '.'",
        ),
    ] = None
    profiler_config: Annotated[
        ProfilerConfig | None,
        option(
            "Lets start_profile() and stop_profile() profile steps with torch's profiler. Keys as in vLLM: profiler "
            "(torch), torch_profiler_dir, torch_profiler_with_stack, torch_profiler_record_shapes, "
            "torch_profiler_with_memory, torch_profiler_with_flops, torch_profiler_use_gzip, delay_iterations and "
            "max_iterations.",
            metavar="JSON",
            expected="a dict or a JSON object",
            convert=parse_profiler_config,
        ),
    ] = None
    speculative_config: Annotated[
        SpeculativeConfig | None,
        option(
            "Speculative decoding: a request's next tokens are guessed, and one step verifies several. Outputs stay "
            "the same. Keys as in vLLM: method (ngram, suffix, draft_model or eagle3), num_speculative_tokens, "
            "num_speculative_tokens_per_batch_size, model, draft_tensor_parallel_size, max_model_len, "
            "prompt_lookup_min, prompt_lookup_max, and those that begin with suffix_decoding_. Steps have guesses only "
            "while they pay, unless num_speculative_tokens_per_batch_size says how many.",
            flags=("-sc", "--speculative-config"),
            metavar="JSON",
            expected="a dict or a JSON object",
            convert=parse_speculative_config,
        ),
    ] = None
    drafter: DrafterConfig | None = None
    """The model that `speculative_config` names. None: guesses need no model."""
    plugins: Plugins = Plugins()
    """What installed packages add to raycore in all processes of the engine."""
    log_level: int = logging.WARNING
    """Log level of the ranks' processes."""

    @property
    def max_steps_in_flight(self) -> int:
        """How many steps an engine starts before it takes the first one's result.

        Engines in lockstep start one: its result says whether there is a next step. So do engines that speculate,
        because guesses follow the last token.
        """
        if self.parallel.is_lockstep:
            return 1
        if self.scheduler.max_concurrent_batches is not None:
            return self.scheduler.max_concurrent_batches
        is_on, num_stages = self.scheduler.async_scheduling, self.parallel.pipeline_parallel_size
        if self.speculative_config is not None:
            return num_stages
        if num_stages > 1:
            # each stage computes a step, and one more is planned, so that no stage waits for a plan
            return num_stages + (is_on is not False)
        return 2 if (self.device == "cuda" if is_on is None else is_on) else 1

    @property
    def tells_tokens(self) -> bool:
        """Whether plans tell the workers all tokens, because stages before the last one can't know which drafts were
        right."""
        return self.parallel.pipeline_parallel_size > 1 and self.speculative_config is not None

    @property
    def max_drafts(self) -> int:
        """Maximum number of a request's tokens that are guessed at a time."""
        return 0 if self.speculative_config is None else self.speculative_config.num_speculative_tokens

    def with_num_ranks(self, num_ranks: int) -> EngineConfig:
        """Return the same configuration with another number of data-parallel ranks."""
        parallel = replace(self.parallel, data_parallel_size=num_ranks)
        return replace(self, parallel=parallel)

    def stages(self) -> list[Stage]:
        """Return the part of the model that each stage of a rank computes."""
        return self.parallel.stages(self.model.spec)

    def check_files(self) -> None:
        """Check that there are files with weights, on a node where workers run.

        Raises:
            InvalidCheckpoint: there are none. The message names the directory.
        """
        if self.model.load_format == "auto" and self.parallel.worker_cls is None:
            for path in [self.model.model] if self.drafter is None else [self.model.model, self.drafter.path]:
                if not has_weight_files(Path(path)):
                    stored_tensors(Path(path))  # raises the error that says what is missing

    def fitted(self) -> EngineConfig:
        """Return the same configuration with what the checkpoints' files say of the models, from their headers.

        Files that this process doesn't see are left to workers, which see them. A description that another process has
        compared with the same tensors stays as it is.

        Raises:
            InvalidCheckpoint: a file is damaged, or the files and config.json are of different models.
            InvalidConfig: saved shares are divided differently.
        """
        model, drafter, path = self.model, self.drafter, Path(self.model.model)
        if model.load_format == "dummy":
            return self
        if model.load_format == "sharded_state":
            model = replace(model, spec=check_saved_state(path, self.shard_pattern, model.spec, self.division))
        elif has_weight_files(path):
            model = replace(model, spec=fit_model(model.spec, path))
        return replace(self, model=model, drafter=None if drafter is None else drafter.fitted())

    @property
    def division(self) -> Division:
        """How the model's weights are divided over the workers."""
        tp_size = self.parallel.tensor_parallel_size
        has_whole_experts = self.parallel.enable_expert_parallel
        ep_size = tp_size * self.parallel.data_parallel_size if has_whole_experts else 1
        return Division(tp_size, ep_size, [len(stage.layers) for stage in self.stages()])

    @property
    def shard_pattern(self) -> str:
        """The pattern of the names of files that `load_format="sharded_state"` reads.

        Raises:
            InvalidConfig: workers would read the same file.
        """
        return checked_pattern((self.model.model_loader_extra_config or {}).get("pattern"), self.division)

    def encode(self) -> bytes:
        """Encode the configuration, with a line that says which copy of raycore did. Actors get it in this form."""
        return seal(msgspec.msgpack.encode(self))

    @staticmethod
    def decode(data: bytes) -> EngineConfig:
        """The inverse of `encode()`. Raises InitializationError if another copy of raycore has encoded it."""
        message = unseal(data, "the process that encoded the configuration", InitializationError)
        return msgspec.msgpack.decode(message, type=EngineConfig)


def changes(old: EngineConfig, new: EngineConfig) -> list[str]:
    """The options that differ, each as text such as `data_parallel_size=2, was 1`. Empty if none differs."""
    found: list[str] = []
    for part in old.__struct_fields__:
        _note_changes(part, getattr(old, part), getattr(new, part), found)
    return found


def non_defaults(options: EngineOptions) -> list[str]:
    """The options that are not at their defaults, each as text such as `data_parallel_size=2`.

    `options`: what `resolve` gets.
    """
    given = check_options(ENGINE_OPTIONS, without_vllm_options(options))
    return [f"{name}={value!r}" for name, value in given.items() if value != ENGINE_OPTIONS[name].default]


def _note_changes(name: str, old: object, new: object, found: list[str]) -> None:
    if old == new:
        return
    if isinstance(old, ModelSpec):
        found.append("another config.json or other tensors in the checkpoint")
    elif isinstance(old, msgspec.Struct) and isinstance(new, msgspec.Struct):
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
    (LoRAConfig, "LoRA adapters"),
)

ENGINE_OPTIONS = {each.name: each for part, group in _PARTS for each in options_of(part, group)}
"""All options of an engine, by keyword argument."""


@with_options(ENGINE_OPTIONS)
def resolve(
    model: str | os.PathLike[str], tokenizer: str | os.PathLike[str] | None = None, **options: Unpack[EngineOptions]
) -> EngineConfig:
    """Check the options, read the checkpoint's `config.json`, and compute the values that were not given.

    Args:
        options: docs/options.md lists them with types, ranges and defaults. None means the default, except for options
            for which None is a value of its own.

    Raises:
        InvalidConfig: an option is unknown or invalid, or two options contradict each other. The message names them.
        InvalidCheckpoint: `model` isn't a checkpoint that raycore supports.
    """
    plugins = find_plugins()
    load_general_plugins(plugins)
    given = check_options(ENGINE_OPTIONS, without_vllm_options({"model": model, "tokenizer": tokenizer, **options}))
    chosen: dict[str, Any] = {
        name: value for name, value in given.items() if value is not None or not ENGINE_OPTIONS[name].is_open
    }
    path, tokenizer = _directories(chosen)
    parallel = _part(ParallelConfig, chosen)
    backend = _executor_backend(chosen.get("executor_backend"), parallel)
    spec = _with_end_of(tokenizer, load_model_spec(path))
    if parallel.enable_expert_parallel and spec.moe is None:
        raise InvalidConfig(f"enable_expert_parallel=True, but {path} ({spec.architecture}) has no experts: omit it")
    spec.check_tensor_parallel(parallel.tensor_parallel_size, parallel.enable_expert_parallel)
    parallel.stages(spec)  # raises if layers can't be divided like this
    _check_quantization(chosen, path, spec)
    _check_cache_dtype(chosen)
    _check_steps_in_flight(chosen, parallel)
    length = _model_length(chosen.get("max_model_len"), spec)
    num_seqs, num_tokens = _step_limits(chosen.get("max_num_seqs"), chosen.get("max_num_batched_tokens"))
    drafter = _drafter(chosen.get("speculative_config"), spec, length, parallel)
    config = _part(
        EngineConfig,
        chosen,
        model=_part(
            ModelConfig,
            chosen,
            model=os.path.abspath(path),
            tokenizer=os.path.abspath(tokenizer),
            spec=spec,
            max_model_len=length,
        ),
        cache=_part(CacheConfig, chosen),
        scheduler=_part(
            SchedulerConfig, chosen, max_num_seqs=num_seqs, max_num_batched_tokens=num_tokens, max_model_len=length
        ),
        parallel=parallel,
        executor=_part(ExecutorConfig, chosen, backend=backend),
        recovery=_part(RecoveryConfig, chosen),
        lora=_lora(chosen),
        drafter=drafter,
        plugins=plugins,
    )
    _check_loader_config(config.model)
    return config.fitted()


def _with_end_of(tokenizer_path: Path, spec: ModelSpec) -> ModelSpec:
    """`spec` with the tokenizer's end-of-sequence token among its own. A fine-tuned model may end outputs with that
    token, although its generation_config.json is the base model's."""
    from raycore.text.tokenizer_files import read_eos_token_id  # imported lazily: `raycore --help` doesn't need it

    token_id = read_eos_token_id(tokenizer_path)
    if token_id is None or token_id in spec.eos_token_ids or token_id >= spec.vocab_size:
        return spec
    return replace(spec, eos_token_ids=[*spec.eos_token_ids, token_id])


def _directories(chosen: dict[str, Any]) -> tuple[Path, Path]:
    """Return the directories of the model and the tokenizer."""
    cache, tokenizer = chosen.get("download_dir"), chosen.get("tokenizer")
    model = find_directory(chosen["model"], "config.json", chosen.get("revision"), cache)
    revision = chosen.get("tokenizer_revision")
    if tokenizer is None:
        if revision not in (None, chosen.get("revision")):
            raise InvalidConfig(f"tokenizer_revision={revision!r} needs tokenizer, the tokenizer's name: omit it")
        return model, model
    return model, find_directory(tokenizer, "tokenizer.json", revision, cache, "tokenizer")


def _check_loader_config(model: ModelConfig) -> None:
    if model.load_format != "sharded_state" and model.model_loader_extra_config is not None:
        raise InvalidConfig(
            f"model_loader_extra_config={model.model_loader_extra_config!r} needs load_format='sharded_state', and "
            f"load_format={model.load_format!r}: omit it"
        )


def _check_quantization(chosen: dict[str, Any], path: Path, spec: ModelSpec) -> None:
    wanted = chosen.get("quantization")
    if wanted is None:
        return
    if wanted == "fp8" and chosen.get("device") == "cpu":
        raise InvalidConfig("quantization='fp8' needs a GPU, and device='cpu': use quantization='int8'")
    if wanted == "int8" and chosen.get("device") == "cuda":
        raise InvalidConfig("quantization='int8' needs a CPU, and device='cuda': use quantization='fp8'")
    if wanted == "fp8" and chosen.get("batch_invariant"):
        raise InvalidConfig(
            "quantization='fp8' can't be used with batch_invariant=True, because the kernel that multiplies in fp8 "
            "depends on the number of tokens: omit one of them"
        )
    if spec.moe is not None:
        raise InvalidConfig(
            f"quantization={wanted!r}, but {path} ({spec.architecture}) has experts, which aren't quantized: omit it"
        )


def _check_cache_dtype(chosen: dict[str, Any]) -> None:
    """What only workers know is checked by `choose_cache_dtype`."""
    wanted, device, backend = (chosen.get(name) for name in ("kv_cache_dtype", "device", "attention_backend"))
    needed = CACHE_BACKENDS.get(wanted or "auto")
    if needed is None:
        return
    if device == ("cuda" if needed == "native" else "cpu"):
        where, other = ("a CPU", "fp8") if needed == "native" else ("a GPU", "int8_per_token_head")
        raise InvalidConfig(f"kv_cache_dtype={wanted!r} needs {where}, and device={device!r}: use {other!r}")
    if backend not in (None, "auto", needed):
        raise InvalidConfig(
            f"kv_cache_dtype={wanted!r} needs attention_backend={needed!r}, and attention_backend={backend!r}: "
            "omit one of them"
        )


def _lora(chosen: dict[str, Any]) -> LoRAConfig:
    lora = _part(LoRAConfig, chosen)
    if lora.enable_lora and lora.num_held < lora.max_loras:
        raise InvalidConfig(
            f"max_cpu_loras={lora.max_cpu_loras} is less than max_loras={lora.max_loras}: workers must hold a step's "
            "adapters"
        )
    return lora


def _check_steps_in_flight(chosen: dict[str, Any], parallel: ParallelConfig) -> None:
    num_steps, is_async = chosen.get("max_concurrent_batches"), chosen.get("async_scheduling")
    num_stages = parallel.pipeline_parallel_size
    if chosen.get("speculative_config") is not None and num_stages == 1 and (is_async or (num_steps or 1) > 1):
        asked = f"max_concurrent_batches={num_steps}" if num_steps else "async_scheduling=True"
        raise InvalidConfig(
            f"{asked} can't be used with speculative_config, whose guesses follow the last token: omit one of them"
        )
    if num_steps is None:
        return
    if is_async is not None and is_async != (num_steps > 1) and num_stages == 1:
        raise InvalidConfig(
            f"max_concurrent_batches={num_steps} contradicts async_scheduling={is_async}, which means "
            f"{'more than one step' if is_async else 'one step'} in flight: omit one of them"
        )
    if num_steps > 1 and parallel.is_lockstep:
        raise InvalidConfig(
            f"max_concurrent_batches={num_steps}, but ranks that share experts run one step at a time: omit it"
        )


def _drafter(
    speculative: SpeculativeConfig | None, spec: ModelSpec, length: int, parallel: ParallelConfig
) -> DrafterConfig | None:
    if speculative is None or not speculative.has_model:
        return None
    return resolve_drafter(
        speculative,
        spec,
        length,
        parallel.tensor_parallel_size,
        expert_parallel=parallel.enable_expert_parallel,
        pp_size=parallel.pipeline_parallel_size,
    )


def _part(struct: type[_PartT], chosen: dict[str, Any], **decided: Any) -> _PartT:
    """Build a part of the configuration from the options given and the values computed from them."""
    fields = {each.field: chosen[each.name] for each in options_of(struct, "") if each.name in chosen}
    return struct(**fields | decided)


def _executor_backend(asked: str | None, parallel: ParallelConfig) -> str:
    if asked == "inline" and parallel.world_size > 1:
        sizes = {name: getattr(parallel, name) for name in ("tensor_parallel_size", "pipeline_parallel_size")}
        needing = " and ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
        raise InvalidConfig(
            f"executor_backend='inline' runs one worker in the engine's process, but {needing} "
            f"need{'' if ' and ' in needing else 's'} {parallel.world_size}: use executor_backend='ray'"
        )
    return asked or ("inline" if parallel.world_size == 1 else "ray")


def _step_limits(num_seqs: int | None, num_tokens: int | None) -> tuple[int, int]:
    """Return `max_num_seqs` and `max_num_batched_tokens`.

    If only one of them is given, the default of the other is adjusted so that a step can hold a token of each sequence.
    """
    if num_seqs is None:
        num_tokens = DEFAULT_MAX_NUM_BATCHED_TOKENS if num_tokens is None else num_tokens
        return min(DEFAULT_MAX_NUM_SEQS, num_tokens), num_tokens
    if num_tokens is None:
        return num_seqs, max(DEFAULT_MAX_NUM_BATCHED_TOKENS, num_seqs)
    if num_tokens < num_seqs:
        raise InvalidConfig(
            f"max_num_batched_tokens={num_tokens} is below max_num_seqs={num_seqs}: "
            "a step must hold at least one token of every running request"
        )
    return num_seqs, num_tokens


def _model_length(asked: int | None, spec: ModelSpec) -> int:
    if asked is None:
        return spec.max_length
    if asked > spec.max_length:
        raise InvalidConfig(
            f"max_model_len={asked} is above the checkpoint's maximum of {spec.max_length} tokens "
            "(max_position_embeddings in its config.json)"
        )
    return asked
