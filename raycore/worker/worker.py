"""raycore's own worker class: one rank of a model's stage, from its device to its steps.

`Worker` is the order of things: what it computes with is a `WorkerCore`, and what else it can do is in its parts. It is
a plain object: an executor decides in which process it runs and how plans reach it.
"""

from __future__ import annotations

import raycore.worker.openmp  # noqa: F401  # pyright: ignore[reportUnusedImport]  # before torch

# isort: split
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from raycore.activity import TAGS, MemoryTag
from raycore.cache_layout import KVCacheConfig, WorkerCacheSpec
from raycore.config import DType, EngineConfig
from raycore.errors import InvalidInput
from raycore.messages import Computation, GrammarOutput, StepPlan, StepResult
from raycore.node import resources as host
from raycore.node.versions import warn_if_untested
from raycore.parts.adapters.worker import AdapterReader
from raycore.parts.constraints.worker import GrammarPreparation
from raycore.parts.experts.worker.regrouping import ExpertRegrouping
from raycore.parts.images.worker import EncodesOnly
from raycore.parts.pooling.worker import PoolsHidden
from raycore.parts.routed_experts.worker import RoutedExpertsOfWorker
from raycore.parts.transfers.worker import WorkerTransfers
from raycore.parts.weights.worker.updates import WorkerWeightUpdates
from raycore.rpc.pending import Pending
from raycore.rpc.start_phases import phase
from raycore.worker.core import NoRunner, WorkerCore, WorkerHooks
from raycore.worker.extension_views import ModelConfigView, ModelRunnerView, ModelView
from raycore.worker.failures import fails_together
from raycore.worker.health import check_device
from raycore.worker.huge_pages import HugePages
from raycore.worker.part import WorkerPart, has_parts
from raycore.worker.protocol import WorkerProtocol
from raycore.worker.rank import WorkerRank
from raycore.worker.runner_factory import make_runner
from raycore.worker.setup import gpu_id, set_up
from raycore.worker.steps import Unreported, WorkerTimes
from raycore.worker.warm_up import warm_up_plans
from raycore.worker.worker_model import WorkerModel
from raycore.worker.worker_profile import WorkerProfiler
from raycore.worker.worker_weights import WorkerWeights
from raycore.worker.worst_steps import run_worst_steps

if TYPE_CHECKING:
    from raycore.decoder.network import Network
    from raycore.runner.launched_step import LaunchedStep

logger = logging.getLogger(__name__)

PartT = TypeVar("PartT", bound=WorkerPart)

PARTS: tuple[type[WorkerPart], ...] = (
    WorkerProfiler,
    GrammarPreparation,
    AdapterReader,
    WorkerTransfers,
    WorkerWeightUpdates,
    WorkerWeights,
    HugePages,
    ExpertRegrouping,
    RoutedExpertsOfWorker,
    PoolsHidden,
    EncodesOnly,
)
"""What workers can do besides. Each class says which workers have it, and which of its methods they have, too."""


@has_parts(PARTS)
class Worker(WorkerProtocol):
    """The worker of one tensor-parallel rank of one stage.

    Call `init_device`, `load_model`, `initialize_cache` and `warm_up`, in this order, before the first step. Methods
    that aren't here, such as `load_model`, are those of `PARTS` that are `called_by_name`.
    """

    def __init__(self, config: EngineConfig, rank: WorkerRank) -> None:
        self._core = WorkerCore(config, rank)
        self._parts: dict[type[WorkerPart], WorkerPart] = {}
        self._step_times = WorkerTimes(0.0, 0.0)
        self._unsampled: tuple[StepPlan, LaunchedStep] | None = None
        """The masked step whose tokens haven't been sampled."""

    @property
    def config(self) -> EngineConfig:
        """The engine's configuration, as far as this worker knows it by now."""
        return self._core.config

    @config.setter
    def config(self, config: EngineConfig) -> None:
        self._core.config = config

    @property
    def rank(self) -> WorkerRank:
        """This worker's ranks."""
        return self._core.rank

    @rank.setter
    def rank(self, rank: WorkerRank) -> None:
        self._core.rank = rank

    @property
    def load_progress(self) -> float:
        """Fraction of the weights that has been read, 0 to 1. Any thread may read it."""
        return self._core.load_progress

    @phase("init device")
    @fails_together
    def init_device(self) -> None:
        """Choose the device, the dtype and the number of threads, and connect to the other workers.

        Raises:
            InvalidConfig: the configured device, attention backend, quantization or kv_cache_dtype is not available, or
                the KV cache would be larger than the memory.
            InvalidCheckpoint: a file is damaged, or the files and config.json are of different models.
        """
        warn_if_untested("torch", torch.__version__)
        core = self._core
        # the driver may not have seen the checkpoint's files, or others than those of this node
        core.config = core.config.fitted()
        self._make_parts()
        setup = set_up(core.config, core.rank)
        core.take(setup)
        logger.info("computes in %s on %s", setup.dtype_name, setup.describe_device())
        core.groups.join(setup)
        core.model = WorkerModel(setup, core.groups)
        core.sizes.check_cache()

    def _make_parts(self) -> None:
        core = self._core
        self._parts = {each: each(core) for each in PARTS if each.is_needed(core.config)}
        core.hooks = WorkerHooks(self._parts.values())

    def _part(self, part: type[PartT], called: str) -> PartT:
        """Return a part, for a call of one of its methods."""
        if part not in self._parts:
            raise InvalidInput(f"{called}() needs an engine with {part.option}")
        return self._parts[part]  # pyright: ignore[reportReturnType]

    def get_kv_cache_spec(self) -> WorkerCacheSpec:
        return self._core.sizes.cache_spec

    @fails_together
    def determine_available_memory(self) -> int:
        """Return how many bytes this worker's share of the KV cache may take, or `kv_cache_memory_bytes` if it is set.

        Raises:
            InvalidConfig: the available memory is less than one block.
        """
        sizes, configured = self._core.sizes, self.config.cache.kv_cache_memory_bytes
        if configured is not None:
            return sizes.cache_as_configured(configured)
        if self.device.type == "cuda":
            return sizes.cache_on_gpu(self._run_worst_steps)
        return sizes.cache_on_cpu(host.available_memory_bytes())

    def _run_worst_steps(self) -> None:
        """Run the steps that need the most memory, with a cache of one block."""
        core, layout = self._core, self._core.sizes.layout
        core.runner = make_runner(core, KVCacheConfig(1, layout))
        run_worst_steps(core.runner, self.config, layout.num_groups)
        core.runner = NoRunner()

    @phase("allocate cache")
    @fails_together
    def initialize_cache(self, cache: KVCacheConfig) -> None:
        """Allocate the KV cache, and create the model runner.

        The cache's layout says how long sequences may be, which may be less than the configuration said.
        """
        core = self._core
        core.take(replace(core.setup, config=self.config.with_max_model_len(cache.layout.limits.max_model_len)))
        core.end_runner()
        for prepare_cache in core.hooks.prepare_cache:
            prepare_cache(cache)
        core.num_cache_groups = cache.layout.num_groups
        core.runner = make_runner(core, cache)

    @phase("warm up")
    @fails_together
    def warm_up(self) -> None:
        """Compute a short prompt and one decode step in block 0, so that one-time costs do not delay the first request.

        Raises:
            InvalidConfig: what `prepare_structured_outputs` loads could not be loaded.
        """
        core = self._core
        prompt, *others = warm_up_plans(core.setup, core.num_cache_groups)
        core.runner.execute(prompt)
        if prompt.num_step_tokens + 1 < self.config.scheduler.max_model_len:
            self.take_draft_token_ids([0], [min(2, self.config.max_drafts)])
        for plan in others:
            core.runner.execute(plan)
        for warmed_up in core.hooks.warmed_up:
            warmed_up()

    # ---- steps

    @fails_together
    def execute_model(self, plan: StepPlan) -> StepResult | Pending[StepResult | None] | None:
        """Run one step, but a masked one only up to its logits. Returns the result on the worker that reports steps,
        and None on others.

        A GPU hasn't finished when this returns, if several steps may be in flight: see `WorkerProtocol.execute_model`.
        If engines share experts, an engine without work gets empty plans while other engines have work.
        """
        core = self._core
        started_s, waited_s = perf_counter(), core.groups.waited_s()
        for begin in core.hooks.begin:
            begin(plan)
        launched = core.runner.launch(plan)
        self._add_time(started_s, waited_s)
        if plan.masked:
            self._unsampled = plan, launched
            return None
        return self._end_step(plan, launched)

    @fails_together
    def sample_tokens(self, grammar: GrammarOutput | None) -> StepResult | Pending[StepResult | None] | None:
        """Run the rest of a masked step. Returns what `execute_model` returns of others; None if there is no rest."""
        if self._unsampled is None:
            return None
        core, (plan, launched) = self._core, self._unsampled
        self._unsampled = None
        started_s, waited_s = perf_counter(), core.groups.waited_s()
        core.runner.sample(launched, grammar)
        self._add_time(started_s, waited_s)
        return self._end_step(plan, launched)

    def _add_time(self, started_s: float, waited_s: float) -> None:
        took_s, link_s = perf_counter() - started_s, self._core.groups.waited_s() - waited_s
        self._step_times = self._step_times.plus(took_s - link_s, link_s)

    def _end_step(self, plan: StepPlan, launched: LaunchedStep) -> StepResult | Pending[StepResult | None] | None:
        core = self._core
        step: Pending[StepResult | None] = launched if core.rank.reports_steps else Unreported(launched)
        for end in core.hooks.end:
            step = end(plan, step)
        # a step that is over is reported at once: the next one may take long
        return step.result() if step.done() or core.config.max_steps_in_flight == 1 else step

    @fails_together
    def take_draft_token_ids(self, slots: list[int], num_tokens: list[int]) -> list[list[int]]:
        """Draft up to `num_tokens[i]` tokens for each slot, with `speculative_config`'s model. Returns the drafts.

        All tokens of these slots must have been received. All workers must call this at the same time; those that don't
        draft return nothing.
        """
        return self._core.runner.take_draft_token_ids(slots, num_tokens)

    def step_times(self) -> WorkerTimes:
        """Return what this worker has spent its time on in steps. On a GPU, that is only the host's time."""
        return self._step_times

    # ---- sleep

    def sleep(self, level: int, tags: Sequence[MemoryTag] = TAGS) -> None:
        """See `WorkerProtocol.sleep`. On a CPU, level 1 leaves weights where they are."""
        core = self._core
        core.before_change()
        with host.freed_memory_returned():
            if "kv_cache" in tags:
                core.end_runner()
            for fall_asleep in core.hooks.fall_asleep:
                fall_asleep(level, tags)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def wake_up(self, tags: Sequence[MemoryTag] = TAGS, reads_weights: bool = True) -> None:
        """See `WorkerProtocol.wake_up`.

        Raises:
            InvalidCheckpoint: as in `load_model()`, after a sleep of level 2.
        """
        for wake in self._core.hooks.wake:
            wake(tags, reads_weights)

    # ---- what others see

    def get_model(self) -> Network:
        """The model, or this worker's part of it."""
        return self._core.model.network

    def apply_model(self, func: Callable[[Network], Any]) -> Any:
        """Call a function on the model, and return its result."""
        return func(self.get_model())

    @property
    def model_runner(self) -> ModelRunnerView:
        """What methods of `worker_extension_cls` find in vLLM's workers: `model_runner.model.load_weights`."""
        return ModelRunnerView(ModelView(self), self.model_config, self.config, self.device)

    @property
    def vllm_config(self) -> EngineConfig:
        """The engine's configuration, whose parts have vLLM's names, too."""
        return self.config

    @property
    def model_config(self) -> ModelConfigView:
        """The model's path and data type."""
        return ModelConfigView(self.config.model.model, self._core.setup.dtype)

    @property
    def device(self) -> torch.device:
        """Where the model is computed."""
        return self._core.setup.device

    @property
    def local_rank(self) -> int:
        """This worker's number among those of its engine on its node."""
        return self.rank.local_rank

    def check_health(self) -> None:
        check_device(self.device)

    def gpu_id(self) -> str:
        """Return this worker's entry in `CUDA_VISIBLE_DEVICES`, or the GPU's index if that variable is not set."""
        return gpu_id(self.device)

    def dtype_name(self) -> DType:
        return self._core.setup.dtype_name

    def computation(self) -> Computation:
        """Return what computes the model. On a CPU with native kernels, this measures the memory for about 20 ms."""
        computation = self._core.setup.computation
        for complete in self._core.hooks.complete:
            computation = complete(computation)
        return computation

    def tell_peers(self, error: BaseException) -> None:
        self._core.tell_peers(error)

    def shutdown(self) -> None:
        core = self._core
        for shut_down in core.hooks.shut_down:
            shut_down()
        core.groups.leave()
        # parts refer to the core: otherwise, only the garbage collector would free the model
        core.hooks = WorkerHooks([])
        self._core, self._parts = WorkerCore(core.config, core.rank), {}
