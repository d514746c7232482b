"""raycore's own worker class: one rank of a model's stage, from its device to its steps.

`Worker` is the order of things: what each part does is in the modules that it composes. It is a plain object: an
executor decides in which process it runs and how plans reach it.
"""

from __future__ import annotations

import raycore.worker.openmp  # noqa: F401  # pyright: ignore[reportUnusedImport]  # before torch

# isort: split
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from raycore.activity import TAGS, MemoryTag
from raycore.cache_layout import KVCacheConfig, WorkerCacheSpec
from raycore.config import DType, EngineConfig
from raycore.errors import InvalidConfig, InvalidInput
from raycore.lora.request import LoRARequest
from raycore.messages import Computation, StepPlan, StepResult
from raycore.node import resources as host
from raycore.node.versions import warn_if_untested
from raycore.pending import Pending
from raycore.runner.runner import ModelRunner
from raycore.structured_outputs import StructuredOutputsParams
from raycore.weight_transfer.ways import Way, make_way
from raycore.weights.loader import empty_decoder_weights
from raycore.worker.adapter_reader import AdapterReader
from raycore.worker.extension_views import ModelConfigView, ModelRunnerView, ModelView
from raycore.worker.failures import fails_together
from raycore.worker.grammar_preparation import GrammarPreparation
from raycore.worker.groups import WorkerGroups
from raycore.worker.in_place import checksum, weight_tensors
from raycore.worker.memory_sizes import MemorySizes, free_bytes
from raycore.worker.protocol import WorkerProtocol
from raycore.worker.rank import MemoryNeed, Regrouping, WorkerRank
from raycore.worker.runner_factory import make_runner
from raycore.worker.setup import WorkerSetup, gpu_id, set_up
from raycore.worker.steps import StepTimes, Unreported
from raycore.worker.warm_up import warm_up_plans
from raycore.worker.weight_reads import LEAST_BYTES, bytes_of_step, read_rate
from raycore.worker.weight_store import describe_stored, read_weights, save_weights, unread_weights
from raycore.worker.weight_units import WeightUnits
from raycore.worker.weight_update import NamedTensors, WeightUpdate
from raycore.worker.worker_model import WorkerModel
from raycore.worker.worker_profile import WorkerProfiler
from raycore.worker.worst_steps import run_worst_steps

if TYPE_CHECKING:
    from raycore.decoder.network import Network
    from raycore.worker.transfers import WorkerTransfers
    from raycore.worker.weight_export import ExportedWeights

logger = logging.getLogger(__name__)


class Worker(WorkerProtocol):
    """The worker of one tensor-parallel rank of one stage.

    Call `init_device`, `load_model`, `initialize_cache` and `warm_up`, in this order, before the first step.
    """

    _setup: WorkerSetup
    """Set by `init_device`."""

    def __init__(self, config: EngineConfig, rank: WorkerRank) -> None:
        self.config = config
        self.rank = rank
        self.load_progress = 0.0
        """Fraction of the weights that has been read, 0 to 1. Any thread may read it."""
        self._groups = WorkerGroups()
        self._loaded: WorkerModel | None = None
        self._adapters: AdapterReader | None = None
        """None without `enable_lora`."""
        self._grammars = GrammarPreparation(config.model)
        self._runner: ModelRunner | None = None
        """None without a KV cache."""
        self._num_cache_groups = 1
        self._transfers: WorkerTransfers | None = None
        """None: there is no KV connector, or no KV cache yet."""
        self._profiler = WorkerProfiler(rank.label.replace(" ", "_"), config.profiler_config)
        self._step_times = StepTimes(0.0, 0.0)
        self._weight_units: WeightUnits | None = None
        """None: no weights have been replaced yet, or others share the experts since."""
        self._update: WeightUpdate | None = None
        """None: none has begun."""
        self._loose: WeightUpdate | None = None
        """What came by `load_weights()` without a beginning or an end. It is applied before the next step."""
        self._stored = ""
        """As in `Computation.weights`."""
        self._way: Way | None = None
        self._exported: ExportedWeights | None = None
        self._lacks_weights = False

    @fails_together
    def init_device(self) -> None:
        """Choose the device, the dtype and the number of threads, and connect to the other workers.

        Raises:
            InvalidConfig: the configured device, attention backend, quantization or kv_cache_dtype is not available, or
                the KV cache would be larger than the memory.
            InvalidCheckpoint: a file is damaged, or the files and config.json are of different models.
        """
        warn_if_untested("torch", torch.__version__)
        # the driver may not have seen the checkpoint's files, or others than those of this node
        self.config = config = self.config.fitted()
        if config.model.prepare_structured_outputs and self.rank.is_last_stage:
            self._grammars.begin_loading()
        self._setup = setup = set_up(config, self.rank)
        logger.info("computes in %s on %s", setup.dtype_name, setup.describe_device())
        self._groups.join(setup)
        self._loaded = model = WorkerModel(setup, self._groups)
        if model.adapters is not None:
            self._adapters = AdapterReader(model.adapters, setup.share, config.lora.max_lora_rank)
        self._sizes.check_cache()

    def load_model(self) -> None:
        """Read this worker's share of its stage's weights, or generate random weights, and build the decoder.

        Raises:
            InvalidCheckpoint: a file or a tensor is missing or damaged.
        """
        setup = self._setup
        if self.rank.pp_size > 1:
            logger.info("this stage has layers %d to %d", setup.stage.layers[0], setup.stage.layers[-1])
        self._model.build(setup, read_weights(setup, setup.share, self._note_progress))
        self._stored = describe_stored(setup)
        if self._stored:
            logger.info("weights of the GGUF file: %s", self._stored)

    def _note_progress(self, num_read: int, num_tensors: int) -> None:
        self.load_progress = num_read / num_tensors

    def get_kv_cache_spec(self) -> WorkerCacheSpec:
        return self._sizes.cache_spec

    @fails_together
    def determine_available_memory(self) -> int:
        """Return how many bytes this worker's share of the KV cache may take, or `kv_cache_memory_bytes` if it is set.

        Raises:
            InvalidConfig: the available memory is less than one block.
        """
        if self.config.cache.kv_cache_memory_bytes is not None:
            return self._sizes.cache_as_configured(self.config.cache.kv_cache_memory_bytes)
        if self._setup.device.type == "cuda":
            return self._sizes.cache_on_gpu(self._run_worst_steps)
        return self._sizes.cache_on_cpu(host.available_memory_bytes())

    def _run_worst_steps(self) -> None:
        """Run the steps that need the most memory, with a cache of one block."""
        self._allocate_cache(KVCacheConfig(1, self._sizes.layout))
        num_groups = self._sizes.layout.num_groups
        run_worst_steps(self._steps, self.config, num_groups, drafts=self._model.drafting is not None)
        self._runner = None

    @fails_together
    def initialize_cache(self, cache: KVCacheConfig) -> None:
        """Allocate the KV cache, and create the model runner. Makes this worker's side of the KV connector, too.

        The cache's layout says how long sequences may be, which may be less than the configuration said.
        """
        self.config = self.config.with_max_model_len(cache.layout.limits.max_model_len)
        self._setup = replace(self._setup, config=self.config)
        if self.config.kv_transfer_config is not None and self._transfers is None:
            # imported lazily: few engines need it
            from raycore.worker.transfers import WorkerTransfers

            self._transfers = WorkerTransfers(self._setup, cache)
        self._allocate_cache(cache)

    def _allocate_cache(self, cache: KVCacheConfig) -> None:
        self._end_runner()
        self._num_cache_groups = cache.layout.num_groups
        compiler = self._grammars.compiler
        self._runner = make_runner(self._setup, self._model, self._groups, compiler, cache, self._transfers)

    def _end_runner(self) -> None:
        """Give up the model runner, if there is one, and the KV cache."""
        if self._transfers is not None:
            self._transfers.connector.release_kv_caches()
        if self._runner is not None:
            self._runner.finish()
        self._runner = None

    @fails_together
    def warm_up(self) -> None:
        """Compute a short prompt and one decode step in block 0, so that one-time costs do not delay the first request.

        Raises:
            InvalidConfig: what `prepare_structured_outputs` loads could not be loaded.
        """
        prompt, *others = warm_up_plans(self._setup, self._num_cache_groups)
        self._steps.execute(prompt)
        if prompt.num_step_tokens + 1 < self.config.scheduler.max_model_len:
            self.take_draft_token_ids([0], [min(2, self.config.max_drafts)])
        for plan in others:
            self._steps.execute(plan)
        self._grammars.finish_loading(self.config.executor.init_timeout_s)

    # ---- steps

    @fails_together
    def execute_model(self, plan: StepPlan) -> StepResult | Pending[StepResult | None] | None:
        """Run one step. Returns the result on the worker that reports steps, and None on others.

        A GPU hasn't finished when this returns, if several steps may be in flight: see `WorkerProtocol.execute_model`.
        If engines share experts, an engine without work gets empty plans while other engines have work.
        """
        if self._loose is not None:
            self._finish_loose()
        started_s, waited_s = perf_counter(), self._groups.waited_s()
        if self._transfers is not None:
            self._transfers.begin(plan)
        launched = self._steps.launch(plan)
        took_s, link_s = perf_counter() - started_s, self._groups.waited_s() - waited_s
        self._step_times = self._step_times.plus(took_s - link_s, link_s)
        step = launched if self.rank.reports_steps else Unreported(launched)
        if self._transfers is not None:
            step = self._transfers.end(plan, step)
        # a step that is over is reported at once: the next one may take long
        return step.result() if self.config.max_steps_in_flight == 1 or step.done() else step

    @fails_together
    def take_draft_token_ids(self, slots: list[int], num_tokens: list[int]) -> list[list[int]]:
        """Draft up to `num_tokens[i]` tokens for each slot, with `speculative_config`'s model. Returns the drafts.

        All tokens of these slots must have been received. All workers must call this at the same time; those that don't
        draft return nothing.
        """
        return [] if self._model.drafting is None else self._steps.take_draft_token_ids(slots, num_tokens)

    def get_kv_connector_handshake_metadata(self) -> bytes | None:
        """Return what this worker's KV connector tells that of the scheduler, after the cache was allocated."""
        assert self._transfers is not None, "kv_transfer_config comes first"
        return self._transfers.connector.get_handshake_metadata()

    def step_times(self) -> StepTimes:
        """Return what this worker has spent its time on in steps. On a GPU, that is only the host's time."""
        return self._step_times

    def prepare_grammars(self, asked: Mapping[int, StructuredOutputsParams], dropped: Sequence[int] = ()) -> list[int]:
        """Start to compile grammars of waiting requests in the background. Only the last stage needs grammars.

        Args:
            asked: constraints by seq_id.
            dropped: seq_ids of earlier calls whose requests have left.

        Returns:
            The seq_ids whose grammars are still being compiled, from this call and earlier ones.
            A grammar that cannot be compiled counts as done: the step that starts its request reports the error.
        """
        return self._grammars.prepare(asked, dropped) if self.rank.is_last_stage else []

    def prepare_adapters(
        self, asked: Mapping[int, LoRARequest], dropped: Sequence[int] = ()
    ) -> tuple[list[int], dict[int, str]]:
        """Start to read adapters on a background thread. Steps can run meanwhile.

        Args:
            asked: adapters, by the slot that each will get. No request uses what is there now.
            dropped: slots whose adapters aren't needed any more.

        Returns:
            The slots of the adapters that are still being read, from this call and earlier ones, and by slot, why
            some can't be used.
        """
        assert self._adapters is not None, "enable_lora=True comes first"
        return self._adapters.prepare(asked, dropped)

    def drop_adapters(self, slots: Sequence[int]) -> None:
        """Give up the memory of the adapters in these slots, also of those that are still being read."""
        assert self._adapters is not None, "enable_lora=True comes first"
        self._adapters.drop(slots)

    def profile(
        self,
        is_start: bool = True,
        profile_prefix: str | None = None,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Start or end a profile of this worker's steps. Ending one that isn't running does nothing.

        Raises:
            InvalidInput: an argument is invalid, a profile is running, or `profiler_config` isn't set.
            OSError: the profile's file can't be written.
        """
        if is_start:
            self._profiler.start(self._runner, profile_prefix, delay_iterations, max_iterations)
        else:
            self._profiler.stop()

    def get_model(self) -> Network:
        """The model, or this worker's part of it."""
        return self._model.decoder

    def apply_model(self, func: Callable[[Network], Any]) -> Any:
        """Call a function on the model, and return its result."""
        return func(self.get_model())

    # ---- weights that sleep, and that are saved

    def sleep(self, level: int, tags: Sequence[MemoryTag] = TAGS) -> None:
        """See `WorkerProtocol.sleep`. On a CPU, level 1 leaves weights where they are."""
        device = self._setup.device
        self._profiler.abandon()  # it knows the parts of the runner and the decoder
        with host.freed_memory_returned():
            if "kv_cache" in tags:
                self._end_runner()
            if "weights" in tags:
                assert self._runner is None, "the runner uses the weights"
                self._update = self._loose = self._exported = None
                self._model.sleep(level, device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()

    def wake_up(self, tags: Sequence[MemoryTag] = TAGS, reads_weights: bool = True) -> None:
        """See `WorkerProtocol.wake_up`.

        Raises:
            InvalidCheckpoint: as in `load_model()`, after a sleep of level 2.
        """
        if "weights" not in tags or self._model.wake_up():
            return
        if reads_weights:
            self.load_model()
        else:
            self._model.build(self._setup, unread_weights(self._setup))
        self._lacks_weights = not reads_weights

    def reload_weights(self) -> None:
        """Read the checkpoint's files again, after another program has changed them.

        For `collective_rpc`, between `wake_up(tags=["weights"])` and `wake_up(tags=["kv_cache"])`.

        Raises:
            InvalidConfig: the KV cache is awake, and with it what uses the weights.
            InvalidCheckpoint: as in `load_model()`.
        """
        if self._runner is not None:
            raise InvalidConfig(
                "reload_weights() is for a KV cache that sleeps: call sleep(level=2) and wake_up(tags=['weights']) "
                "before it, and wake_up(tags=['kv_cache']) after it"
            )
        self._model.sleep(2, self._setup.device)
        self.load_model()

    def load_weights(self, weights: NamedTensors) -> set[str]:
        """Replace weights in place, by tensors with the names and the whole shapes that they have in checkpoints.

        No step may run meanwhile. Parts of the model that lack tensors wait for other calls: until the next step, or
        until `finish_weight_update()` after `start_weight_update()`.

        Args:
            weights: if it is a sequence, all are checked before the first one changes anything.

        Returns: the names.

        Raises:
            InvalidInput: the model has no such tensor, or it has another shape or kind of numbers.
        """
        self._profiler.abandon()  # it stands between the decoder and its layers
        update = self._update or self._loose
        if update is None:
            update = self._loose = self._new_update()
        return update.load(weights)

    def start_weight_update(self, needs_all: bool = False) -> None:
        """Begin an update: `load_weights()` or `update_weights()` bring tensors until `finish_weight_update()`.

        Args:
            needs_all: the update can only end when all weights have been replaced. For a worker that hasn't those that
                its engine had before.

        Raises:
            InvalidInput: an update has begun already.
        """
        if self._update is not None:
            raise InvalidInput("start_weight_update() comes after finish_weight_update(): an update has begun already")
        self._profiler.abandon()
        self._finish_loose()
        self._update = self._new_update(needs_all)

    def finish_weight_update(self) -> None:
        """Apply what is left of the update, and end it.

        Raises:
            InvalidInput: no update has begun, or what has come can't be applied. The update goes on then.
        """
        self._begun_update.finish()
        self._end_update()
        self._lacks_weights = False

    def cancel_weight_update(self) -> bool:
        """Give up the update, if one has begun. Returns whether it has changed weights."""
        update = self._update
        self._end_update()
        return update is not None and update.has_changed

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connect to a trainer, by the way that `weight_transfer_config` names.

        Raises:
            InvalidInput: the information is invalid.
            RaycoreError: the trainer and all workers haven't met in time.
        """
        self._begun_way.connect(init_info)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Get tensors from the trainer, after `start_weight_update()`. All are checked before the first one changes
        anything.

        Raises:
            InvalidInput: the information is invalid, or the model has no such tensors.
            RaycoreError: the trainer doesn't send in time.
        """
        self._begun_way.receive(update_info, self._begun_update.load, self._begun_update.check)

    def shutdown_weight_transfer_engine(self) -> None:
        """Disconnect from the trainer."""
        if self._way is not None:
            self._way.disconnect()
            self._way = None

    def reload_from(self, path: str) -> None:
        """Replace all weights in place by those of the checkpoint in the directory `path`, unit by unit.

        Its files are of the same model: names and shapes are checked before anything changes.

        Raises:
            InvalidCheckpoint: a file is damaged, or a tensor is missing or has another shape.
            InvalidInput: an update has begun.
        """
        if self._update is not None:
            raise InvalidInput("reload_from(): an update of weights has begun: finish or cancel it first")
        self._profiler.abandon()
        self._loose = None
        units = WeightUnits(self._setup, self._model, Path(path))
        units.reload()
        self._weight_units, self._lacks_weights = units, False

    def export_weights(self) -> list[dict[str, Any]]:
        """Put all weights into Ray's object store, as they are in memory. Returns what `import_weights` takes.

        They stay there until `release_exported_weights()`.
        """
        self._finish_loose()
        from raycore.worker.weight_export import ExportedWeights  # imported lazily: imports Ray

        self._exported = ExportedWeights(self._model.weight_tensors())
        return self._exported.pieces

    def import_weights(self, pieces: list[dict[str, Any]]) -> None:
        """Take the weights of a worker with the same share, whose layers keep them in the same forms.

        Raises:
            RaycoreError: layers keep them in other forms. What weights this worker has then isn't known.
        """
        self._profiler.abandon()
        self._update = self._loose = None
        self._model.num_changes += 1
        from raycore.worker.weight_export import import_pieces  # imported lazily: imports Ray

        import_pieces(self._model.weight_tensors(), pieces, self.config.executor.init_timeout_s)
        self._units.refresh()
        self._lacks_weights = False

    def release_exported_weights(self) -> None:
        """Remove from the object store what `export_weights` has put there."""
        self._exported = None

    @property
    def model_runner(self) -> ModelRunnerView:
        """What methods of `worker_extension_cls` find in vLLM's workers: `model_runner.model.load_weights`."""
        return ModelRunnerView(
            ModelView(self), ModelConfigView(self.config.model.model, self._setup.dtype), self.config, self.device
        )

    @property
    def vllm_config(self) -> EngineConfig:
        """The engine's configuration, whose parts have vLLM's names, too."""
        return self.config

    @property
    def model_config(self) -> ModelConfigView:
        """The model's path and data type."""
        return self.model_runner.model_config

    @property
    def device(self) -> torch.device:
        """Where the model is computed."""
        return self._setup.device

    @property
    def local_rank(self) -> int:
        """This worker's number among those of its engine on its node."""
        return self.rank.local_rank

    def weights_checksum(self) -> str:
        """Return a hash over all weights as they are in memory. Workers with equal shares have equal hashes."""
        self._finish_loose()
        return checksum(self._model.weight_tensors())

    @property
    def num_weight_changes(self) -> int:
        """A number that grows whenever weights change, and sometimes more often."""
        return self._model.num_changes

    def lacks_weights(self) -> bool:
        """Whether the weights have no numbers: since a `wake_up()` that reads none, until a whole update is over."""
        return self._lacks_weights

    def _new_update(self, needs_all: bool = False) -> WeightUpdate:
        return WeightUpdate(self._units, needs_all=needs_all or self._lacks_weights)

    def _end_update(self) -> None:
        self._update = None
        if self._way is not None:
            self._way.end_update()

    def _finish_loose(self) -> None:
        """Apply what `load_weights()` has got without `start_weight_update()`."""
        if self._loose is not None:
            self._loose.finish()
            self._loose = None
            self._lacks_weights = False

    @property
    def _begun_update(self) -> WeightUpdate:
        if self._update is None:
            raise InvalidInput("start_weight_update() comes first: no update of weights has begun")
        return self._update

    @property
    def _begun_way(self) -> Way:
        config = self.config.weight_transfer_config
        if config is None:
            raise InvalidInput(
                "weights come from a trainer with the option weight_transfer_config: start the engine with, for "
                "example, weight_transfer_config={'backend': 'ray'}"
            )
        if self._way is None:
            rank = self.rank.number_among_all
            self._way = make_way(config, rank, self._setup.device)
        return self._way

    @property
    def _units(self) -> WeightUnits:
        if self._weight_units is None:
            model = self.config.model
            path = Path(model.model) if model.load_format == "auto" else None
            self._weight_units = WeightUnits(self._setup, self._model, path)
        return self._weight_units

    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> list[str]:
        """Write this worker's share of the weights to the directory `path`, for `load_format="sharded_state"`.

        Args:
            pattern: the files' names. None: `model-rank-{rank}-part-{part}.safetensors`, or with stages
                `model-pp-{pp_rank}-tp-{tp_rank}-part-{part}.safetensors`.
            max_size: the size at which another file is begun, in bytes. None: one file.

        Returns: the paths of the files with weights.

        Raises:
            InvalidConfig: the pattern can't be used, or the checkpoint's weights are quantized.
            OSError: a file can't be written.
        """
        if self.rank.pcp_rank > 0:
            return []  # another worker has the same share
        return [str(each) for each in save_weights(self._setup, Path(path), pattern, max_size)]

    # ---- another number of ranks that share experts

    def memory_need(self, num_ranks: int, num_local_workers: Sequence[int], num_blocks: int) -> MemoryNeed:
        """Return how much more memory this worker needs if `num_ranks` ranks share experts.

        Args:
            num_local_workers: for each worker of this rank, the number of workers of all these ranks on its node.
            num_blocks: size of the KV cache, which counts if this worker is new.
        """
        needed = self._sizes.more_for(num_ranks, num_blocks)
        return MemoryNeed(max(0, needed), free_bytes(self._setup.device) // num_local_workers[self.rank.worker])

    @fails_together
    def regroup(self, regrouping: Regrouping) -> None:
        """Leave the workers that this one shares experts with, and join others, between two steps.

        All workers of all ranks that stay, come or leave must do this at the same time. Experts move from worker to
        worker. A new worker gets all its weights from others, and needs its cache afterwards.

        Raises: if another worker is gone or stuck. This one can't continue then.
        """
        self._profiler.abandon()  # it stands between the decoder and its layers
        before = self._setup
        setup = before.with_ranks(regrouping.num_ranks, regrouping.rendezvous)
        exchange = self._groups.regroup(setup, regrouping)
        self.config, self.rank = setup.config, msgspec.structs.replace(setup.rank, is_new=False)
        self._setup = setup = replace(setup, rank=self.rank)
        self._weight_units = None
        if before.rank.is_new:
            weights = empty_decoder_weights(setup.share)
            exchange.receive(weights)
            self._model.build(setup, weights)
        else:
            self._model.exchange_experts(exchange, before.experts, setup.experts)
            if self._runner is not None:
                self._runner.share_experts(self._groups.experts)
        exchange.close()
        self._groups.end_regrouping()

    @fails_together
    def accompany_warm_up(self) -> None:
        """Take part in the `warm_up()` of new workers, which need the others' experts."""
        for plan in warm_up_plans(self._setup, self._num_cache_groups):
            self._steps.execute(StepPlan(plan.step))

    def check_health(self) -> None:
        if self._setup.device.type == "cuda":
            torch.cuda.synchronize(self._setup.device)

    def gpu_id(self) -> str:
        """Return this worker's entry in `CUDA_VISIBLE_DEVICES`, or the GPU's index if that variable is not set."""
        return gpu_id(self._setup.device)

    def dtype_name(self) -> DType:
        return self._setup.dtype_name

    def computation(self) -> Computation:
        """Return what computes the model. On a CPU with native kernels, this measures the memory for about 20 ms."""
        computation = msgspec.structs.replace(self._setup.computation, weights=self._stored)
        if self._loaded is None or not self._loaded.is_built or not computation.backend.startswith("native"):
            return computation
        step_bytes = bytes_of_step(self._model.decoder, self.config.model.spec)
        if step_bytes < LEAST_BYTES:
            return computation
        torch.set_num_threads(self._setup.max_threads)
        rate = read_rate(weight_tensors(self._model.decoder).values())
        return msgspec.structs.replace(computation, step_bytes=step_bytes if rate else 0, memory_rate=rate)

    def tell_peers(self, error: BaseException) -> None:
        self._groups.fail(self.rank, error)

    def shutdown(self) -> None:
        self._profiler.abandon()
        if self._transfers is not None:
            self._transfers.connector.shutdown()
            self._transfers = None
        self.shutdown_weight_transfer_engine()
        self._runner = self._loaded = self._adapters = self._exported = self._weight_units = None
        self._groups.leave()
        self._groups = WorkerGroups()

    @property
    def _model(self) -> WorkerModel:
        assert self._loaded is not None, "init_device() comes first"
        return self._loaded

    @property
    def _steps(self) -> ModelRunner:
        assert self._runner is not None, "initialize_cache() comes first"
        return self._runner

    @property
    def _sizes(self) -> MemorySizes:
        return MemorySizes(self._setup, self._model.drafting)
