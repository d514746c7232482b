"""What a processor is configured with. Names and meanings are those of `ray.data.llm`, as far as it has them. Pure."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeVar, cast

import msgspec
from msgspec.structs import force_setattr

from raycore.config import ENGINE_OPTIONS
from raycore.config.ray_llm import num_workers, take, with_resources
from raycore.config.vllm_table import without_vllm_options
from raycore.errors import InvalidConfig
from raycore.json_fields import shortened
from raycore.options.declared import check_options, settings_of
from raycore.plain_errors import decode_problem
from raycore.short_tracebacks import ends_traceback

TaskType = Literal["generate", "embed", "classify", "score"]
Concurrency = int | tuple[int, int]

_StageT = TypeVar("_StageT", bound="StageConfig")

_CONVERT = {"embed": "embed", "classify": "classify", "score": "classify"}
"""The option `convert` of an engine that pools, by task."""
_ERA = 2
"""How many times the requests that a rank runs at a time are on their way to it by default."""
_DEFAULT_SEQS = 256
_LEAST_CPUS = 0.01
"""The smallest part of a CPU that a worker reserves."""


class StageConfig(msgspec.Struct, kw_only=True, frozen=True):
    """What all stages have.

    A stage runs in the engine's process, unless it has a value for one of `batch_size`, `concurrency`, `runtime_env`,
    `num_cpus` and `memory`, or a `model_source` of its own. It then has map actors of its own.
    """

    enabled: bool = True
    batch_size: int | None = None
    """Rows in a batch. None: as the processor."""
    concurrency: Concurrency | None = None
    """How many map actors there are, or the fewest and the most. n: from 1 to n."""
    runtime_env: dict[str, Any] | None = None
    num_cpus: float | None = None
    """CPUs that each map actor reserves. None: 0."""
    memory: float | None = None
    """Bytes of memory that each map actor reserves."""

    @ends_traceback
    def __post_init__(self) -> None:
        _check_types(self)
        check_concurrency(self.concurrency)

    def has_own_actors(self, config: ProcessorConfig) -> bool:
        """Whether the stage runs in map actors of its own."""
        source = getattr(self, "model_source", None)
        needs = (self.batch_size, self.concurrency, self.runtime_env, self.num_cpus, self.memory)
        return self.enabled and (any(each is not None for each in needs) or source not in (None, config.model_source))


class ChatTemplateStageConfig(StageConfig, kw_only=True, frozen=True):
    """Renders `messages` as `prompt`."""

    model_source: str | None = None
    """Whose chat template it is. None: the processor's model."""
    chat_template: str | None = None
    """Jinja text, or the name of one of the checkpoint's templates. None: the checkpoint's default."""
    chat_template_kwargs: dict[str, Any] | None = None
    """The template's variables, such as `enable_thinking`."""


class TokenizerStageConfig(StageConfig, kw_only=True, frozen=True):
    """Encodes `prompt` as `tokenized_prompt`."""

    model_source: str | None = None


class DetokenizeStageConfig(StageConfig, kw_only=True, frozen=True):
    """Decodes `generated_tokens` as `generated_text`, of rows whose sampling parameters have `detokenize=False`."""

    model_source: str | None = None


class PrepareMultimodalStageConfig(StageConfig, kw_only=True, frozen=True):
    """Reads and decodes the images of `messages`. Without this stage, the engine's process does."""

    model_config_kwargs: dict[str, Any] | None = None
    """No effect, as the other fields: the checkpoint and its template say how images become prompts."""
    chat_template_content_format: Literal["string", "openai"] | None = "string"
    apply_sys_msg_formatting: bool | None = False


class ProcessorConfig(msgspec.Struct, kw_only=True, frozen=True):
    """How a processor runs a model on a dataset.

    Raises:
        InvalidConfig: from the constructor, if a value is invalid. The message names it.
    """

    model_source: str
    """Directory of a checkpoint, or its name on the hub."""
    batch_size: int = 32
    """Rows in a batch. Ray Data runs a batch again if the map actor dies that has it."""
    concurrency: Concurrency = 1
    """Number of data-parallel ranks of the one engine. `(m, n)`: m, and up to n as far as they find room."""
    accelerator_type: str | None = None
    """The type of the accelerators that the workers need, such as `H100`."""
    runtime_env: dict[str, Any] | None = None
    """The runtime environment of the engine's processes."""
    max_pending_requests: int | None = None
    """How many rows of each rank the engine may have at a time. None, or not positive: all that come."""
    max_concurrent_batches: int | None = None
    """How many batches of each rank run at a time. None: so many that twice `max_num_seqs` rows are on their way."""
    max_tasks_in_flight_per_actor: int | None = None
    """How many tasks Ray Data gives the map actor at a time. None: as Ray Data's context says, else twice as many as
    run."""
    should_continue_on_error: bool = False
    """Whether a row that fails gets its error in `__inference_error__`. Otherwise it ends the pipeline."""
    engine_kwargs: dict[str, Any] = {}
    """Options of the engine: docs/options.md."""
    task_type: TaskType = "generate"
    log_engine_metrics: bool = True
    """Whether Ray exports the engine's metrics."""
    dynamic_lora_loading_path: str | None = None
    """The directory with the adapters that rows name as their `model`. None: these are directories or on the hub."""
    placement_group_config: dict[str, Any] | None = None
    """`bundle_per_worker`: what each worker reserves, or `bundles`: a list of that for the workers of a rank, which are
    equal. `strategy`: PACK or STRICT_PACK."""
    chat_template_stage: Any = True
    """True, False, a dict, or the stage's configuration, as for the other stages. Read, it is the configuration."""
    tokenize_stage: Any = True
    detokenize_stage: Any = True
    prepare_multimodal_stage: Any = False

    @ends_traceback
    def __post_init__(self) -> None:
        _check_types(self)
        check_concurrency(self.concurrency)
        for name in ("batch_size", "max_concurrent_batches", "max_tasks_in_flight_per_actor"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidConfig(f"{name}={value!r} isn't a positive integer")
        for name, struct in _STAGES.items():  # once: the stages are asked for with each row
            force_setattr(self, name, stage(name, getattr(self, name), struct))
        engine_options(self)

    @property
    def ranks(self) -> tuple[int, int]:
        """The fewest and the most ranks of the engine."""
        return (self.concurrency, self.concurrency) if isinstance(self.concurrency, int) else self.concurrency

    @property
    def num_batches(self) -> int:
        """How many batches run at a time, for all ranks."""
        seqs = self.engine_kwargs.get("max_num_seqs") or _DEFAULT_SEQS
        return self.ranks[1] * (self.max_concurrent_batches or max(2, math.ceil(_ERA * seqs / self.batch_size)))

    @property
    def max_rows(self) -> int | None:
        """How many rows the engine may have at a time. None: all that come."""
        most = self.max_pending_requests
        return None if most is None or most <= 0 else most * self.ranks[1]

    @property
    def chat_template(self) -> ChatTemplateStageConfig:
        """The stage that renders conversations."""
        return self.chat_template_stage

    @property
    def tokenize(self) -> TokenizerStageConfig:
        """The stage that encodes prompts."""
        return self.tokenize_stage

    @property
    def detokenize(self) -> DetokenizeStageConfig:
        """The stage that decodes outputs."""
        return self.detokenize_stage

    @property
    def prepare_multimodal(self) -> PrepareMultimodalStageConfig:
        """The stage that reads images."""
        return self.prepare_multimodal_stage


_STAGES: dict[str, type[StageConfig]] = {
    "chat_template_stage": ChatTemplateStageConfig,
    "tokenize_stage": TokenizerStageConfig,
    "detokenize_stage": DetokenizeStageConfig,
    "prepare_multimodal_stage": PrepareMultimodalStageConfig,
}


def stage(name: str, given: Any, struct: type[_StageT]) -> _StageT:
    """Return a stage's configuration. `given`: a bool, a dict, or a configuration, which may also be Ray's.

    Raises:
        InvalidConfig: it is something else, or has an invalid value.
    """
    if isinstance(given, struct):
        return given
    if isinstance(given, bool):
        return struct(enabled=given)
    if hasattr(given, "model_dump"):
        given = given.model_dump()
    if not isinstance(given, dict):
        raise InvalidConfig(f"{name}={shortened(given)} isn't True, False, a dict or a {struct.__name__}")
    try:
        return settings_of(name, cast("dict[str, Any]", given), struct)
    except msgspec.ValidationError as error:  # from the constructor
        raise InvalidConfig(f"{name}: {error}") from None


def check_concurrency(given: Concurrency | None) -> None:
    """Raise InvalidConfig if it isn't a positive number, or two of which the first isn't larger."""
    low, high = given if isinstance(given, tuple) else (given, given)
    if low is not None and high is not None and not 1 <= low <= high:
        raise InvalidConfig(f"concurrency={given!r} isn't a positive integer, or two that ascend")


def engine_options(config: ProcessorConfig) -> dict[str, Any]:
    """Return the keyword arguments of the engine, without the model.

    Raises:
        InvalidConfig: an option is invalid or contradicts the configuration. The message names it.
    """
    options = dict(config.engine_kwargs)
    take(options, "model", config.model_source, "model_source")
    take(options, "data_parallel_size", config.ranks[0], "concurrency")
    take(options, "task_type", config.task_type, "task_type")
    options["data_parallel_size"] = config.ranks[0]
    if config.task_type == "generate":
        options.setdefault("runner", "generate")
    else:
        options["runner"] = "pooling"
        options.setdefault("convert", _CONVERT[config.task_type])
    options = with_resources(options, config.placement_group_config, config.accelerator_type)
    check_options(ENGINE_OPTIONS, without_vllm_options(options))
    return options


def cpus_of_ranks(config: ProcessorConfig, cluster_cpus: float, num_left: int = 1) -> tuple[float, float]:
    """How many CPUs each worker reserves, and all ranks together, so that `num_left` are left to Ray Data's own tasks.

    `cluster_cpus`: how many the cluster has.
    """
    options = engine_options(config)
    workers = num_workers(options)
    # more than one worker: the rank's engine has a process of its own
    num_processes = config.ranks[1] * (workers + (workers > 1))
    resources: dict[str, float] = options.get("resources_per_worker") or {}
    given = resources.get("CPU")
    if given is None and options.get("wait_for_nodes_s"):
        given = 1.0  # there will be more
    cpus_each = (cluster_cpus - num_left) / num_processes
    cpus = given or (1.0 if cpus_each >= 1 else max(_LEAST_CPUS, math.floor(cpus_each * 100) / 100))
    return cpus, cpus * num_processes


def _check_types(given: msgspec.Struct) -> None:
    for field in msgspec.structs.fields(given):
        value = getattr(given, field.name)
        try:
            msgspec.convert(value, field.type)
        except msgspec.ValidationError as error:
            raise InvalidConfig(f"{field.name}={shortened(value)}: {decode_problem(error)}") from None
