"""Builds the steps of a Ray Data pipeline that runs a model on a dataset."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from raycore.config import ENGINE_OPTIONS
from raycore.data.config import ProcessorConfig, StageConfig, cpus_of_ranks, engine_options
from raycore.data.engine_stage import EngineStage
from raycore.data.rows import ERROR
from raycore.data.stages import ChatTemplate, CpuStage, Detokenize, PrepareMultimodal, Tokenize
from raycore.errors import InvalidConfig
from raycore.extras import needing
from raycore.short_tracebacks import ends_traceback

if TYPE_CHECKING:
    from ray.data import Dataset

logger = logging.getLogger(__name__)

RowFunction = Callable[[dict[str, Any]], dict[str, Any]]

_PATIENCE_S = 60
"""How much longer Ray Data waits for the engine than the engine for its ranks."""
_INPUTS = {
    "messages": "A conversation in OpenAI's format. With images, if the model sees them.",
    "prompt": "The prompt's text.",
    "tokenized_prompt": "The prompt's token ids.",
    "sampling_params": "The fields of raycore.SamplingParams, as a dict. Only for the task generate, which needs it.",
    "pooling_params": "The fields of raycore.PoolingParams, as a dict. Only for the other tasks. Optional.",
    "model": "The adapter that the row uses. The processor's model_source, or null, is the model itself. Optional.",
    "multimodal_data": 'A prompt\'s images: {"image": [...]}. Optional, as multimodal_uuids and mm_processor_kwargs.',
    "tokenization_kwargs": "truncate_prompt_tokens, truncation_side and add_special_tokens, as a dict. Optional.",
}


@dataclass
class MapStage:
    """One `map_batches` of a processor."""

    fn: type[Any]
    """The class that the map actors run."""
    map_batches_kwargs: dict[str, Any]
    """Arguments of `map_batches`."""
    fn_constructor_kwargs: dict[str, Any] = field(default_factory=dict[str, Any])


class Processor:
    """Runs a model on a dataset: `processor(dataset)` is the dataset with the outputs, which nothing computes yet."""

    def __init__(
        self,
        config: ProcessorConfig,
        stages: dict[str, MapStage],
        preprocess: RowFunction | None,
        postprocess: RowFunction | None,
        preprocess_map_kwargs: dict[str, Any],
        postprocess_map_kwargs: dict[str, Any],
    ) -> None:
        """Use `build_processor`."""
        self.config = config
        self.stages = stages
        self._preprocess = None if preprocess is None else partial(_preprocessed, preprocess)
        self._postprocess = None if postprocess is None else partial(_postprocessed, postprocess, config)
        self._preprocess_map_kwargs = preprocess_map_kwargs
        self._postprocess_map_kwargs = postprocess_map_kwargs

    def __call__(self, dataset: Dataset) -> Dataset:
        """Add the processor's steps to a dataset's.

        The dataset's context then says that the engine starts before other steps run, and how many CPUs these may use,
        unless it has such a limit already.
        """
        cpus = _make_room(dataset, self.config)
        steps: Any = dataset  # Ray Data's annotations leave much open
        if self._preprocess is not None:
            steps = steps.map(self._preprocess, **self._preprocess_map_kwargs)
        for name, stage in self.stages.items():
            constructor = dict(stage.fn_constructor_kwargs)
            if name == "EngineStage":
                # the batches of a block run one after the other, so a batch is a block
                steps = steps.repartition(target_num_rows_per_block=stage.map_batches_kwargs["batch_size"])
                constructor["resources_per_worker"] = {"CPU": cpus} | (
                    engine_options(self.config).get("resources_per_worker") or {}
                )
            steps = steps.map_batches(stage.fn, fn_constructor_kwargs=constructor, **stage.map_batches_kwargs)
        if self._postprocess is not None:
            steps = steps.map(self._postprocess, **self._postprocess_map_kwargs)
        return steps

    def list_stage_names(self) -> list[str]:
        """The names of the stages that have actors, in order."""
        return list(self.stages)

    def get_stage_by_name(self, name: str) -> MapStage:
        """The stage of this name. Raises ValueError if there is none."""
        if name not in self.stages:
            raise ValueError(f"there is no stage {name!r}: the stages are {', '.join(self.stages)}")
        return self.stages[name]

    def log_input_column_names(self) -> None:
        """Log which columns rows may have, at level INFO."""
        lines = [f"\t{name}: {text}" for name, text in _INPUTS.items()]
        logger.info("a row needs messages, prompt or tokenized_prompt. Columns:\n%s", "\n".join(lines))


@ends_traceback
def build_processor(
    config: ProcessorConfig,
    preprocess: RowFunction | None = None,
    postprocess: RowFunction | None = None,
    preprocess_map_kwargs: dict[str, Any] | None = None,
    postprocess_map_kwargs: dict[str, Any] | None = None,
    builder_kwargs: dict[str, Any] | None = None,
) -> Processor:
    """Build a processor, which runs a model on a dataset.

    Args:
        preprocess: called with each row before the model. The row gets the columns that it returns.
        postprocess: called with each row that didn't fail, after the model. The row has only the columns that it
            returns. None: rows have all columns.
        preprocess_map_kwargs: arguments of `Dataset.map` for `preprocess`, such as `num_cpus`.
        postprocess_map_kwargs: the same for `postprocess`.
        builder_kwargs: may have `chat_template_kwargs`, variables of the chat template.

    Raises:
        InvalidConfig: `config` isn't a `ProcessorConfig`, Ray Data isn't installed, or `builder_kwargs` has something
            else.
    """
    unknown = (builder_kwargs or {}).keys() - {"chat_template_kwargs"}
    if unknown:
        raise InvalidConfig(f"builder_kwargs has {sorted(unknown)[0]!r}: known is 'chat_template_kwargs'")
    return _build(
        config,
        preprocess=preprocess,
        postprocess=postprocess,
        preprocess_map_kwargs=preprocess_map_kwargs,
        postprocess_map_kwargs=postprocess_map_kwargs,
        **(builder_kwargs or {}),
    )


def register() -> None:
    """Have `ray.data.llm.build_processor` take a `ProcessorConfig`, too, if it is installed."""
    try:
        from ray.llm._internal.batch import processor as rays
    except ImportError:  # Ray's part needs pyarrow and pydantic, raycore.data.build_processor only pyarrow
        return
    try:
        builder: Any = rays.ProcessorBuilder
        builder.register(ProcessorConfig, _build)
    except ValueError as error:  # something else has this name
        logger.warning("ray.data.llm.build_processor doesn't take raycore.data.ProcessorConfig: %s", error)


def _build(
    config: ProcessorConfig,
    *,
    preprocess: RowFunction | None = None,
    postprocess: RowFunction | None = None,
    preprocess_map_kwargs: dict[str, Any] | None = None,
    postprocess_map_kwargs: dict[str, Any] | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> Processor:
    given: Any = config  # users may pass anything
    if not isinstance(given, ProcessorConfig):
        raise InvalidConfig(f"config={given!r} isn't a raycore.data.ProcessorConfig")
    if chat_template_kwargs is not None and config.chat_template.chat_template_kwargs is None:
        chat = replace(config.chat_template, chat_template_kwargs=chat_template_kwargs)
        config = replace(config, chat_template_stage=chat)
    return Processor(
        config, _stages(config), preprocess, postprocess, preprocess_map_kwargs or {}, postprocess_map_kwargs or {}
    )


def _stages(config: ProcessorConfig) -> dict[str, MapStage]:
    with needing("build_processor needs", "data"):
        from ray.data import ActorPoolStrategy
    stages: dict[str, MapStage] = {}
    threads = "max_concurrent_calls_per_actor"
    is_old = threads not in inspect.signature(ActorPoolStrategy).parameters

    def add(name: str, fn: type[CpuStage], stage: StageConfig) -> None:
        if not stage.has_own_actors(config):
            return
        concurrency = stage.concurrency or config.concurrency
        low, high = (1, concurrency) if isinstance(concurrency, int) else concurrency
        given = {"runtime_env": stage.runtime_env or config.runtime_env, "memory": stage.memory}
        stages[name] = MapStage(
            fn,
            {
                "compute": ActorPoolStrategy(min_size=low, max_size=high),
                "batch_size": stage.batch_size or config.batch_size,
                "batch_format": None,  # as the blocks are: Ray Data can't convert all of pandas
                "num_cpus": stage.num_cpus or 0,
                **{key: value for key, value in given.items() if value is not None},
            },
            {"config": config},
        )

    add("PrepareMultimodalStage", PrepareMultimodal, config.prepare_multimodal)
    add("ChatTemplateStage", ChatTemplate, config.chat_template)
    add("TokenizeStage", Tokenize, config.tokenize)
    stages["EngineStage"] = MapStage(
        EngineStage,
        {
            # one actor, whose threads run the batches: it owns the engine
            "compute": ActorPoolStrategy(
                size=1,
                max_tasks_in_flight_per_actor=config.max_tasks_in_flight_per_actor,
                enable_true_multi_threading=True,
                **({} if is_old else {threads: config.num_batches}),
            ),
            **({"max_concurrency": config.num_batches} if is_old else {}),
            "batch_size": config.batch_size,
            "batch_format": None,
            "num_cpus": 0,
            **({} if config.runtime_env is None else {"runtime_env": config.runtime_env}),
        },
        {"config": config},
    )
    add("DetokenizeStage", Detokenize, config.detokenize)
    return stages


def _make_room(dataset: Dataset, config: ProcessorConfig) -> float:
    """See to it that the ranks get their CPUs, and Ray Data's tasks others. Returns how many a worker reserves."""
    import ray
    from ray.data import ExecutionResources

    read: Any = ray.cluster_resources
    resources: dict[str, float] = read()
    total = float(resources.get("CPU", 0.0))
    options, context = engine_options(config), dataset.context
    # the actor that skips rows of earlier runs reserves a CPU, too
    num_left = 1 if getattr(context, "checkpoint_config", None) is None else 2
    cpus, reserved = cpus_of_ranks(config, total, num_left)
    # tasks that wait for the engine to take their rows keep their CPUs meanwhile: the ranks come first
    start_s = sum(
        options.get(name) or ENGINE_OPTIONS[name].default for name in ("init_timeout_s", "placement_timeout_s")
    )
    patience_s = int(start_s + (options.get("wait_for_nodes_s") or 0) + _PATIENCE_S)
    context.wait_for_min_actors_s = max(context.wait_for_min_actors_s, patience_s)
    limits = context.execution_options.resource_limits
    if limits.cpu in (None, math.inf) and not options.get("wait_for_nodes_s"):
        if total - reserved < num_left:
            logger.warning(
                "the ranks reserve %g of the cluster's %g CPUs: tasks of Ray Data that need a CPU may never run",
                *(reserved, total),
            )
        # also if the engine is started again, because the map actor has died
        context.execution_options.resource_limits = ExecutionResources.for_limits(
            cpu=max(0.0, total - reserved),
            gpu=limits.gpu,
            object_store_memory=limits.object_store_memory,
            memory=limits.memory,
        )
    return cpus


def _preprocessed(function: RowFunction, row: dict[str, Any]) -> dict[str, Any]:
    return {**row, **function(row)}


def _postprocessed(function: RowFunction, config: ProcessorConfig, row: dict[str, Any]) -> dict[str, Any]:
    if row.get(ERROR):
        return row
    return {**function(row), **({ERROR: ""} if config.should_continue_on_error else {})}
