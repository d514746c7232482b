"""raycore's own worker class: the device, weights, KV cache and model runner of one rank of a model's stage.

The worker decides how it starts and how much memory the KV cache gets. It is a plain object: an executor decides in
which process it runs and how plans reach it.
"""

from __future__ import annotations

import raycore.worker.openmp  # noqa: F401  # pyright: ignore[reportUnusedImport]  # before torch

# isort: split
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import torch

from raycore.activity import TAGS, MemoryTag
from raycore.attention.kv_tensors import KVTensors
from raycore.attention.spec import AttentionSpec, HeadShape
from raycore.checkpoint.lora_spec import LoraSpec
from raycore.checkpoint.sharded_state import Shard, ShardPaths, check_saved_state, checked_pattern, copy_other_files
from raycore.checkpoint.stages import Stage
from raycore.class_paths import import_class
from raycore.config import DType, EngineConfig, SchedulerConfig
from raycore.config.profiler import checked_prefix, session_config
from raycore.decoder.decoder import Decoder, reorder_adapter_
from raycore.errors import InvalidConfig, InvalidInput, InvalidRequest, RaycoreError
from raycore.grammar.compiler import GrammarCompiler
from raycore.kernels import library as kernels
from raycore.layers.lora import Adapters, ArrangedAdapter, can_be_native
from raycore.layers.operations import Operations
from raycore.layers.rows import TILE_ROWS
from raycore.lora.request import LoRARequest
from raycore.messages import Computation, NewRequest, StepPlan, StepResult
from raycore.models.spec import ModelSpec
from raycore.node import resources as host
from raycore.node.cpu_features import cpu_features
from raycore.node.versions import hardware, warn_if_untested
from raycore.parallel.experts import ExpertParallel
from raycore.parallel.links import Link
from raycore.parallel.rendezvous import Rendezvous
from raycore.parallel.returned_tokens import TokenReceiver
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.pending import Pending
from raycore.plugins import MODELS
from raycore.runner.compute_threads import ComputeThreads
from raycore.runner.decode_graphs import CudaCapture, DecodeGraphs, decode_sizes
from raycore.runner.runner import ModelRunner
from raycore.runner.step_memory import StepLimits, step_bytes
from raycore.sampling.sampler import Sampler
from raycore.sampling_params import SamplingParams
from raycore.step.batch import SlotBatch
from raycore.step.device_batch import DeviceBatch
from raycore.structured_outputs import StructuredOutputsParams
from raycore.weights.linear_formats import CONVERTED, LinearFormats
from raycore.weights.loader import (
    DecoderWeights,
    Progress,
    empty_decoder_weights,
    load_decoder_weights,
    random_decoder_weights,
)
from raycore.weights.lora_weights import largest_lora_bytes, load_lora_weights
from raycore.weights.offload import OffloadedTensors, tensors_of
from raycore.weights.sharded_state import load_saved_weights, save_decoder_weights
from raycore.weights.share import WeightShare
from raycore.worker.attention_backend import choose_attention_backend, choose_cache_dtype, choose_operations_backend
from raycore.worker.compute_backend import ComputeBackend
from raycore.worker.cpu_dtype import choose_cpu_dtype
from raycore.worker.draft_worker import DraftWorker
from raycore.worker.gpu_memory import MemoryUse
from raycore.worker.linear_formats import choose_formats
from raycore.worker.protocol import WorkerProtocol
from raycore.worker.rank import MemoryNeed, Regrouping, WorkerRank
from raycore.worker.regrouping import expert_share, make_exchange, num_held, weight_bytes, weight_share
from raycore.worker.weight_exchange import WeightExchange
from raycore.worker.worker_profile import WorkerProfile
from raycore.worker.worst_steps import worst_steps

logger = logging.getLogger(__name__)

_MAX_DEFAULT_CACHE_BYTES = 4 << 30
"""Maximum default size of a worker's KV cache on a CPU, where other programs use the same memory."""
_DEFAULT_CPU_SHARE = 0.5
"""A worker's default share of its available memory for the KV cache on a CPU, times `gpu_memory_utilization`."""

_GRAPH_BYTES = 256 << 20
"""Set aside on a GPU for the memory of CUDA graphs, which are captured later."""


class StepTimes(NamedTuple):
    """What a worker has spent its time on in all its steps so far, in seconds of the host."""

    computing_s: float
    link_s: float
    """Waiting for the worker of the stage before, or of the next one."""


def _give_way_to_steps() -> None:
    """Make this thread a background thread: steps have priority."""
    torch.set_num_threads(1)  # otherwise torch starts more threads for this one, beside those that steps use
    if sys.platform == "linux":  # elsewhere, the priority is that of the whole process
        os.nice(10)


class Worker(WorkerProtocol):
    """The worker of one tensor-parallel rank of one stage.

    Call `init_device`, `load_model`, `initialize_cache` and `warm_up`, in this order, before the first step.
    """

    def __init__(self, config: EngineConfig, rank: WorkerRank) -> None:
        self.config = config
        self.rank = rank
        self._device = torch.device("cpu")
        self._dtype = torch.float32
        self._max_threads = 1
        self._threads = ComputeThreads()
        self._ranks = TensorParallel()
        self._experts: ExpertParallel | None = None
        self._workers: Rendezvous | None = None
        """The workers of this engine. None if there is only this one."""
        self._expert_workers: Rendezvous | None = None
        """The workers of all ranks that share experts."""
        self._source: Link | None = None
        self._sink: Link | None = None
        self._token_link: Link | None = None
        """Between the last stage and the first one: takes sampled tokens there."""
        self._step_times = StepTimes(0.0, 0.0)
        self._backend = ComputeBackend("torch", "torch", self._device, config.model.batch_invariant, self._dtype)
        self._operations: Operations = self._backend.operations()
        self._formats = CONVERTED
        self.load_progress = 0.0
        """Fraction of the weights that has been read, 0 to 1. Any thread may read it."""
        self._decoder: Decoder | None = None
        self._drafting: DraftWorker | None = None
        """None: this worker doesn't draft."""
        self._offloaded: OffloadedTensors | None = None
        """The weights while they are in the host's memory."""
        self._runner: ModelRunner | None = None
        self._adapters: Adapters | None = None
        """None without `enable_lora`."""
        self._readings: dict[int, Future[ArrangedAdapter]] = {}
        """Adapters that are being read, by the place that they will get."""
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="raycore-adapters", initializer=_give_way_to_steps)
        self._profile: WorkerProfile | None = None
        spec = config.model.spec
        self._grammars = GrammarCompiler(config.model.tokenizer, spec.vocab_size, spec.eos_token_ids)
        self._grammars_under_way: dict[int, Future[Any]] = {}
        """Futures of grammars that are being compiled, by the seq_id of the waiting request."""
        self._prepared: Future[Any] | None = None
        """Completes once the tokenizer and llguidance are loaded. None without `prepare_structured_outputs`."""

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
            self._prepared = self._grammars.prepare()
        if config.device == "cuda":
            self._device = _cuda_device(self.rank.local_rank)
        else:
            host.keep_freed_memory()
            cores = max(1, host.usable_cores() // self.rank.num_local_workers)
            self._max_threads = config.executor.num_threads or cores
            torch.set_num_threads(self._max_threads)
        self._dtype = _choose_dtype(config, self._device)
        self._choose_backends()
        logger.info("computes in %s on %s", self.dtype_name(), self._describe_device())
        if self.rank.world_size > 1:
            self._join_engine()
        if config.parallel.is_lockstep and not self.rank.is_new:
            self._join_experts()
        self._drafting = self._make_drafting()
        if config.lora.enable_lora:
            is_native = self._backend.operations_by == "native" and can_be_native(config.model.spec, self.rank.tp_size)
            self._adapters = Adapters(
                self._device,
                config.lora.num_places,
                is_native=is_native,
                batch_invariant=config.model.batch_invariant,
            )
        if self._device.type == "cuda":
            memory = 1, torch.cuda.mem_get_info(self._device)[1], f"GPU {self._device}"
        else:
            memory = self.rank.num_local_workers, host.total_memory_bytes(), "this node"
        config.cache.check_memory(*memory, self.bytes_per_block())

    def _choose_backends(self) -> None:
        """Choose what computes, and the formats of the cache and of weights, for the model of the configuration."""
        config = self.config
        heads = HeadShape.of(config.model.spec, self.rank.tp_size)
        asked = config.model.attention_backend
        operations = choose_operations_backend(asked, self._device)
        attention = choose_attention_backend(asked, self._device, heads, config.cache.block_size, self._dtype)
        cache_dtype = choose_cache_dtype(config.cache.kv_cache_dtype, attention, self._device, self._dtype)
        self._backend = ComputeBackend(operations, attention, self._device, config.model.batch_invariant, cache_dtype)
        self._formats = choose_formats(config.model, self.rank.tp_size, self._device, is_native=operations == "native")

    def _make_drafting(self) -> DraftWorker | None:
        """Return this worker's part in drafting. If one worker is enough, that is the one that reports steps."""
        config, drafter = self.config, self.config.drafter
        if drafter is None or (drafter.tensor_parallel_size < self.rank.tp_size and not self.rank.reports_steps):
            return None
        return DraftWorker(config, drafter, self._ranks, self._device, self._dtype, _decoder_class(drafter.spec))

    def load_model(self) -> None:
        """Read this worker's share of its stage's weights, or generate random weights, and build the decoder.

        Raises:
            InvalidCheckpoint: a file or a tensor is missing or damaged.
        """
        if self.rank.pp_size > 1:
            logger.info("this stage has layers %d to %d", self._stage.layers[0], self._stage.layers[-1])
        self._build_decoder(self._read_weights(self._device, self._formats, self._note_progress))

    def _build_decoder(self, weights: DecoderWeights) -> None:
        model = self.config.model
        self._operations = self._backend.operations()
        with torch.inference_mode():
            # a plugin's decoder may know nothing of adapters
            adapted = {} if self._adapters is None else {"adapters": self._adapters}
            self._decoder = _decoder_class(model.spec)(
                model.spec, weights, self._ranks, self._operations, self._experts, self._stage, **adapted
            )
            depends_on_threads = (
                self._operations.depends_on_threads
                or self._backend.depends_on_threads
                or (self._adapters is not None and not self._adapters.rows.is_native)
            )
            is_fixed = model.batch_invariant and depends_on_threads
            self._threads = ComputeThreads(self._max_threads, is_fixed=is_fixed)
            if model.batch_invariant:
                self._check_tiles(self._decoder)
        if self._drafting is not None:
            self._drafting.load(self._decoder)

    def _read_weights(self, device: torch.device, formats: LinearFormats, progress: Progress | None) -> DecoderWeights:
        """Read or generate this worker's share of the weights."""
        model, path = self.config.model, Path(self.config.model.model)
        share = self._share(device, formats)
        if model.load_format == "dummy":
            # on another kind of device, they would be others
            return random_decoder_weights(self._share(self._device, formats), model.seed)
        if model.load_format == "sharded_state":
            pattern = self.config.shard_pattern
            # once more, because scale() may have changed the number of workers that share experts
            spec = check_saved_state(path, pattern, model.spec, self.config.division)
            return load_saved_weights(replace(share, spec=spec), ShardPaths(path, pattern, self._shard), progress)
        return load_decoder_weights(share, path, progress)

    def _share(self, device: torch.device, formats: LinearFormats) -> WeightShare:
        """Return what this worker holds of the model's weights."""
        return weight_share(self.config, self.rank, self._dtype, device, formats)

    @property
    def _shard(self) -> Shard:
        """Which share of the weights this worker has, among all different ones."""
        rank = self.rank
        return Shard(rank.ep_rank if self.config.parallel.enable_expert_parallel else rank.tp_rank, rank.pp_rank)

    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> list[str]:
        """Write this worker's share of the weights to the directory `path`, for `load_format="sharded_state"`.

        The weights are read again, because layers keep them in other forms. The worker that writes the first share
        also copies the checkpoint's other files.

        Args:
            pattern: the files' names. None: `model-rank-{rank}-part-{part}.safetensors`, or with stages
                `model-pp-{pp_rank}-tp-{tp_rank}-part-{part}.safetensors`.
            max_size: the size at which another file is begun, in bytes. None: one file.

        Returns: the paths of the files with weights.

        Raises:
            InvalidConfig: the pattern can't be used, or the checkpoint's weights are quantized.
            OSError: a file can't be written.
        """
        model, directory = self.config.model, Path(path)
        if model.spec.quantization is not None:
            raise InvalidConfig(f"{model.model} has quantized weights, which save_sharded_state() can't write")
        division = self.config.division
        pattern = checked_pattern(pattern, division)
        directory.mkdir(parents=True, exist_ok=True)
        weights = self._read_weights(torch.device("cpu"), CONVERTED, None)
        files = ShardPaths(directory, pattern, self._shard)
        paths = save_decoder_weights(weights, model.spec, division, files, max_size)
        if self._shard == Shard(0):
            copy_other_files(Path(model.model), Path(model.tokenizer), directory)
        return [str(each) for each in paths]

    def _describe_device(self) -> str:
        computation = self.computation()
        software = f"torch {torch.__version__}, backend {computation.backend}"
        if computation.parts_by_torch:
            software += f", by plain torch: {', '.join(computation.parts_by_torch)}"
        if self._device.type == "cuda":
            return f"{torch.cuda.get_device_name(self._device)}: {software}"
        return f"{hardware()}: {software}, up to {self._max_threads} threads"

    def _check_tiles(self, decoder: Decoder) -> None:
        """Test on this device whether tiles are batch-invariant, with as many threads as real steps use.

        If they aren't, log a warning. Rows are then computed one at a time.
        """
        self._threads.begin_step(TILE_ROWS, decoder.num_weights)
        if not decoder.check_tiles():
            logger.warning(
                "batch_invariant=True: on device %s a token's result depends on its position in a tile of %d tokens, "
                "so tokens are computed one at a time, which is slow",
                self._device,
                TILE_ROWS,
            )

    def _note_progress(self, num_read: int, num_tensors: int) -> None:
        self.load_progress = num_read / num_tensors

    def determine_available_memory(self) -> int:
        """Return how many bytes this worker's share of the KV cache may take.

        If `kv_cache_memory_bytes` is set, returns that.

        Raises:
            InvalidConfig: the available memory is less than one block.
        """
        if self.config.cache.kv_cache_memory_bytes is not None:
            return self.config.cache.kv_cache_memory_bytes
        if self._device.type == "cuda":
            return self._available_on_gpu()
        share = self.config.cache.gpu_memory_utilization
        per_worker = host.available_memory_bytes() // self.rank.num_local_workers
        per_worker -= self._step_bytes(self.config) + self._adapter_bytes
        available = min(int(per_worker * share * _DEFAULT_CPU_SHARE), _MAX_DEFAULT_CACHE_BYTES)
        if available < self.bytes_per_block():
            raise InvalidConfig(
                f"not enough memory for the KV cache on {self._device}: {available} bytes are available, and one block "
                f"takes {self.bytes_per_block()}: free memory, set the cache's size (kv_cache_memory_bytes), or lower "
                f"max_num_batched_tokens={self.config.scheduler.max_num_batched_tokens}"
            )
        return available

    def _available_on_gpu(self) -> int:
        """Run the steps that need the most memory, and return how much they leave for the KV cache, in bytes."""
        weights = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self.initialize_cache(1)
        assert self._runner is not None
        prompts, *others = worst_steps(self.config.scheduler, self.config.cache.block_size, self.config.max_drafts)
        self._runner.execute(prompts)
        if self._drafting is not None:
            # logits and sampling take as much as in the target's largest steps, which follow
            slots = np.frombuffer(prompts.slots, np.int32).tolist()
            self._runner.take_draft_token_ids(slots, [1] * len(slots))
        for plan in others:
            self._runner.execute(plan)
        step = torch.cuda.max_memory_allocated(self._device) - weights
        self._runner = None
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        use = MemoryUse(
            total=total,
            share=self.config.cache.gpu_memory_utilization,
            free=free,
            weights=weights,
            adapters=self._adapter_bytes,
            step=step,
            graphs=_GRAPH_BYTES if self._has_graphs() else 0,
        )
        if use.left < self.bytes_per_block():
            raise InvalidConfig(f"not enough memory for the KV cache on {self._device}:\n{use.table()}")
        return use.left

    @property
    def _adapter_bytes(self) -> int:
        """The memory that all LoRA adapters may take."""
        config, lora = self.config, self.config.lora
        if not lora.enable_lora:
            return 0
        share = weight_share(config, self.rank, self._dtype, self._device)
        return lora.num_places * largest_lora_bytes(share, lora.max_lora_rank)

    def bytes_per_block(self) -> int:
        """Return how many bytes one KV cache block takes on this worker."""
        spec = self.config.model.spec
        num_kv_heads = spec.kv_heads_per_rank(self.rank.tp_size)
        own = KVTensors.bytes_per_block(
            len(self._stage.layers),
            num_kv_heads,
            self.config.cache.block_size,
            spec.head_dim,
            self._backend.cache_dtype,
        )
        return own if self._drafting is None else own + self._drafting.bytes_per_block()

    def initialize_cache(self, num_blocks: int) -> None:
        """Allocate `num_blocks` KV cache blocks, and create the model runner."""
        assert self._decoder is not None, "load_model() comes first"
        self._end_runner()
        config, spec = self.config, self.config.model.spec
        block_size = config.cache.block_size
        max_seqs, max_model_len = config.scheduler.max_num_seqs, config.scheduler.max_model_len
        qk_norms_NH, sinks_N, layers = self._decoder.qk_norms_NH, self._decoder.sinks_N, self._stage.layers
        attention_spec = AttentionSpec.of(
            spec, self.rank.tp_size, qk_norms_NH, max_model_len, self._dtype, self._device, layers, sinks_N
        )
        heads = attention_spec.heads
        kv = KVTensors(
            len(layers),
            num_blocks,
            heads.num_kv_heads,
            block_size,
            heads.head_dim,
            self._backend.cache_dtype,
            self._device,
        )
        sizes = decode_sizes(max_seqs) if self._has_graphs() else []
        max_rows = max([max_seqs, *sizes])
        batch = DeviceBatch(SlotBatch(max_seqs, max_model_len, block_size), self._device, decode_sizes=sizes)
        sampler, drafter = None, None
        if self.rank.is_last_stage:
            sampler = Sampler(spec.vocab_size, self._backend.sampling(), grammars=self._grammars)
            if self._drafting is not None:
                drafter = self._drafting.make_drafter(
                    self._decoder, batch, sampler, self._threads, num_blocks, max_rows
                )
        self._runner = ModelRunner(
            self._decoder,
            self._backend.attention(
                attention_spec, kv, max_model_len=max_model_len, max_num_seqs=max_seqs, max_rows=max_rows
            ),
            batch,
            sampler,
            threads=self._threads,
            reports=self.rank.reports_steps,
            experts=self._experts,
            graphs=DecodeGraphs(CudaCapture()) if sizes else None,
            source=self._source,
            sink=self._sink,
            token_source=self._token_receiver(batch),
            token_sink=self._token_link if self.rank.is_last_stage else None,
            drafter=drafter,
            adapter_rows=None if self._adapters is None else self._adapters.rows,
        )

    def _end_runner(self) -> None:
        """Give up the model runner, if there is one, and the KV cache."""
        if self._runner is not None:
            self._runner.finish()
        self._runner = None

    def _token_receiver(self, batch: DeviceBatch) -> TokenReceiver | None:
        if self._token_link is None or self.rank.is_last_stage:
            return None
        return TokenReceiver(self._token_link, batch, self._most_steps_in_flight)

    def _has_graphs(self) -> bool:
        """Whether steps of decodes run as CUDA graphs.

        Ranks that share experts have other sizes in every step, and the steps of stages begin and end with a transfer.
        """
        is_eager = self.config.model.enforce_eager or self.config.parallel.is_lockstep
        return self._backend.attention_by == "triton" and not is_eager and self.rank.pp_size == 1

    def _warm_up_plans(self) -> list[StepPlan]:
        num_tokens = min(8, self.config.cache.block_size, self.config.scheduler.max_model_len)
        request = NewRequest(
            slot=0,
            token_ids=np.zeros(num_tokens - 1, np.int32).tobytes(),
            num_prompt_tokens=num_tokens - 1,
            num_computed_tokens=0,
            block_ids=np.zeros(1, np.int32).tobytes(),
            params=SamplingParams(temperature=0.0),
            seed=0,
        )
        slot = np.zeros(1, np.int32).tobytes()
        counts = np.array([num_tokens - 1], np.int32).tobytes()
        plans = [
            StepPlan(step=-3, slots=slot, num_tokens=counts, new_requests=[request]),
            StepPlan(step=-2, slots=slot),
            StepPlan(step=-1, freed_slots=[0]),
        ]
        if self._backend.operations_by == "triton":
            # compiles the kernels that other requests need; Triton keeps them on disk for the next start
            limits = SchedulerConfig(1, num_tokens, num_tokens)
            plans += worst_steps(limits, self.config.cache.block_size)
        return plans

    def warm_up(self) -> None:
        """Compute a short prompt and one decode step in block 0, so that one-time costs do not delay the first request.

        Raises:
            InvalidConfig: what `prepare_structured_outputs` loads could not be loaded.
        """
        assert self._runner is not None, "initialize_cache() comes first"
        prompt, *others = self._warm_up_plans()
        self._runner.execute(prompt)
        if self._drafting is not None and prompt.num_step_tokens + 1 < self.config.scheduler.max_model_len:
            self._runner.take_draft_token_ids([0], [min(2, self.config.max_drafts)])
        for plan in others:
            self._runner.execute(plan)
        if self._prepared is not None:
            try:
                self._prepared.result(self.config.executor.init_timeout_s)
            except InvalidRequest as error:
                raise InvalidConfig(f"prepare_structured_outputs=True: {error}") from error

    def execute_model(self, plan: StepPlan) -> StepResult | Pending[StepResult | None] | None:
        """Run one step. Returns the result on the worker that reports steps, and None on others.

        A GPU hasn't finished when this returns, if several steps may be in flight: see `WorkerProtocol.execute_model`.
        If engines share experts, an engine without work gets empty plans while other engines have work.
        """
        assert self._runner is not None, "initialize_cache() comes first"
        started_s, waited_s = perf_counter(), self._waited_s()
        launched = self._runner.launch(plan)
        self._note_step(perf_counter() - started_s, self._waited_s() - waited_s)
        step = launched if self.rank.reports_steps else _Unreported(launched)
        # a step that is over is reported at once: the next one may take long
        return step.result() if self.config.max_steps_in_flight == 1 or step.done() else step

    def take_draft_token_ids(self, slots: list[int], num_tokens: list[int]) -> list[list[int]]:
        """Draft up to `num_tokens[i]` tokens for each slot, with `speculative_config`'s model. Returns the drafts.

        All tokens of these slots must have been received. All workers must call this at the same time; those that don't
        draft return nothing.
        """
        assert self._runner is not None, "initialize_cache() comes first"
        return [] if self._drafting is None else self._runner.take_draft_token_ids(slots, num_tokens)

    def step_times(self) -> StepTimes:
        """Return what this worker has spent its time on in steps. On a GPU, that is only the host's time."""
        return self._step_times

    def sleep(self, level: int, tags: Sequence[MemoryTag] = TAGS) -> None:
        """See `WorkerProtocol.sleep`. On a CPU, level 1 leaves weights where they are."""
        self._end_profile()  # it knows the parts of the runner and the decoder
        with host.freed_memory_returned():
            if "kv_cache" in tags:
                self._end_runner()
            if "weights" in tags:
                assert self._runner is None, "the runner uses the weights"
                self._give_up_weights(level)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()

    def _give_up_weights(self, level: int) -> None:
        if level >= 2:
            if self._offloaded is not None and self._adapters is not None:
                self._offloaded.restore()  # adapters that stay are among the tensors
            self._decoder = self._offloaded = None
            self._operations = self._backend.operations()  # the old ones know all layers
            if self._adapters is not None:
                self._adapters.leave_layers()  # it knows them, too
            if self._drafting is not None:
                self._drafting.unload()
        elif self._device.type == "cuda" and self._decoder is not None and self._offloaded is None:
            network = None if self._drafting is None else self._drafting.network
            self._offloaded = OffloadedTensors(tensors_of((self._decoder, network), self._device))

    def wake_up(self, tags: Sequence[MemoryTag] = TAGS) -> None:
        """See `WorkerProtocol.wake_up`.

        Raises:
            InvalidCheckpoint: as in `load_model()`, after a sleep of level 2.
        """
        if "weights" not in tags:
            return
        if self._decoder is None:
            self.load_model()
        elif self._offloaded is not None:
            self._offloaded.restore()
            self._offloaded = None

    # ---- another number of ranks that share experts

    def memory_need(self, num_ranks: int, num_local_workers: Sequence[int], num_blocks: int) -> MemoryNeed:
        """Return how much more memory this worker needs if `num_ranks` ranks share experts.

        Args:
            num_local_workers: for each worker of this rank, the number of workers of all these ranks on its node.
            num_blocks: size of the KV cache, which counts if this worker is new.
        """
        config = self.config.with_num_ranks(num_ranks)
        rank = self.rank.with_experts(config.parallel, None)
        needed = weight_bytes(weight_share(config, rank, self._dtype, self._device)) + self._step_bytes(config)
        if self.rank.is_new:
            needed += num_blocks * self.bytes_per_block() + self._adapter_bytes
            if self._drafting is not None:
                needed += self._drafting.weight_bytes()
        else:
            needed -= weight_bytes(self._share(self._device, CONVERTED)) + self._step_bytes(self.config)
        return MemoryNeed(max(0, needed), self._free_memory() // num_local_workers[rank.worker])

    def regroup(self, regrouping: Regrouping) -> None:
        """Leave the workers that this one shares experts with, and join others, between two steps.

        All workers of all ranks that stay, come or leave must do this at the same time. Experts move from worker to
        worker. A new worker gets all its weights from others, and needs its cache afterwards.

        Raises: if another worker is gone or stuck. This one can't continue then.
        """
        self._end_profile()  # it stands between the decoder and its layers
        before, num_before = self.rank, num_held(self.config, self.rank)
        config = self.config.with_num_ranks(regrouping.num_ranks)
        rank = before.with_experts(config.parallel, regrouping.rendezvous)
        workers = self._meet_all(rank, regrouping.num_involved)
        exchange = make_exchange(workers, regrouping, config, rank)
        is_member = config.parallel.is_lockstep and rank.dp_rank < regrouping.num_ranks
        experts = self._form_group(workers, rank) if is_member else None
        workers.part()
        self._leave_experts()
        self.config, self.rank = config, msgspec.structs.replace(rank, is_new=False)
        self._experts, self._expert_workers = experts, workers
        if before.is_new:
            weights = empty_decoder_weights(weight_share(config, rank, self._dtype, self._device))
            exchange.receive(weights)
            self._build_decoder(weights)
        else:
            self._exchange_experts(exchange, num_before)
        exchange.close()

    def accompany_warm_up(self) -> None:
        """Take part in the `warm_up()` of new workers, which need the others' experts."""
        assert self._runner is not None, "this worker runs"
        for plan in self._warm_up_plans():
            self._runner.execute(StepPlan(plan.step))

    def _exchange_experts(self, exchange: WeightExchange, num_before: int) -> None:
        assert self._decoder is not None, "load_model() comes first"
        share = expert_share(self.config, self.rank)
        assert share is not None, "only ranks that share experts are regrouped"
        with torch.inference_mode():
            exchange.exchange(self._decoder, share.experts)
        self._decoder.share_experts(self._experts, len(share.experts) - num_before)
        if self._runner is not None:
            self._runner.share_experts(self._experts)

    def _free_memory(self) -> int:
        """Return how many bytes this worker could allocate now."""
        if self._device.type != "cuda":
            return host.available_memory_bytes()
        unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return torch.cuda.mem_get_info(self._device)[0] + unused

    def prepare_grammars(self, asked: Mapping[int, StructuredOutputsParams], dropped: Sequence[int] = ()) -> list[int]:
        """Start to compile grammars of waiting requests on a background thread. Steps can run meanwhile.

        Only the last stage needs grammars.

        Args:
            asked: constraints by seq_id.
            dropped: seq_ids of earlier calls whose requests have left.

        Returns:
            The seq_ids whose grammars are still being compiled, from this call and earlier ones.
            A grammar that cannot be compiled counts as done: the step that starts its request reports the error.
        """
        if not self.rank.is_last_stage:
            return []
        unneeded = [self._grammars_under_way.pop(seq_id, None) for seq_id in dropped]
        self._grammars_under_way |= {seq_id: self._grammars.begin(each) for seq_id, each in asked.items()}
        for future in unneeded:
            # other requests may have the same constraint
            if future is not None and future not in self._grammars_under_way.values():
                self._grammars.cancel(future)
        for seq_id in [seq_id for seq_id, future in self._grammars_under_way.items() if future.done()]:
            del self._grammars_under_way[seq_id]
        return list(self._grammars_under_way)

    def prepare_adapters(
        self, asked: Mapping[int, LoRARequest], dropped: Sequence[int] = ()
    ) -> tuple[list[int], dict[int, str]]:
        """Start to read adapters on a background thread. Steps can run meanwhile.

        Args:
            asked: adapters, by the place that each will get. No request uses what is there now.
            dropped: places whose adapters aren't needed any more.

        Returns:
            The places of the adapters that are still being read, from this call and earlier ones, and by place, why
            some can't be used.
        """
        assert self._adapters is not None, "enable_lora=True comes first"
        self.drop_adapters(dropped)
        for place, adapter in asked.items():
            self._readings[place] = self._reader.submit(self._read_adapter, adapter)
        failed: dict[int, str] = {}
        for place in [place for place, reading in self._readings.items() if reading.done()]:
            reading = self._readings.pop(place)
            error = reading.exception()
            if error is None:
                self._adapters.hold(place, reading.result())
            else:
                failed[place] = str(error) if isinstance(error, RaycoreError) else f"{type(error).__name__}: {error}"
        return list(self._readings), failed

    def drop_adapters(self, places: Sequence[int]) -> None:
        """Give up the memory of the adapters in these places, also of those that are still being read."""
        assert self._adapters is not None, "enable_lora=True comes first"
        for place in places:
            reading = self._readings.pop(place, None)
            if reading is not None:
                reading.cancel()
            self._adapters.drop(place)

    def _read_adapter(self, adapter: LoRARequest) -> ArrangedAdapter:
        """Read this worker's share of an adapter."""
        assert self._adapters is not None, "enable_lora=True comes first"
        spec, rank = self.config.model.spec, self.rank
        path = Path(adapter.lora_path)
        lora = LoraSpec.read(path, spec, self.config.lora.max_lora_rank)
        weights = load_lora_weights(self._share(self._device, CONVERTED), lora, path)
        reorder_adapter_(weights, spec, rank.tp_size, self._stage.layers.start)
        return self._adapters.arrange(weights)

    def check_health(self) -> None:
        """Raise an error if the device no longer works."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

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
        if not is_start:
            profile, self._profile = self._profile, None
            if profile is not None:
                profile.stop()
            return
        config = session_config(self.config.profiler_config, delay_iterations, max_iterations)
        prefix = checked_prefix(profile_prefix)
        if self._profile is None or not self._profile.is_open:
            if self._runner is None:
                raise InvalidInput("start_profile(): the engine is asleep, so it runs no steps: call wake_up()")
            self._profile = WorkerProfile(self.rank.label.replace(" ", "_"), self._runner)
        self._profile.start(config, prefix)

    def gpu_id(self) -> str:
        """Return this worker's entry in `CUDA_VISIBLE_DEVICES`, or the GPU's index if that variable is not set."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return visible.split(",")[self._device.index] if visible else str(self._device.index)

    def dtype_name(self) -> DType:
        """Return the name of the chosen dtype, such as `bfloat16`."""
        return cast(DType, str(self._dtype).removeprefix("torch."))

    def computation(self) -> Computation:
        """Return what computes the model."""
        backend = self._backend.operations_by
        name = f"native ({kernels.load()})" if backend == "native" else backend
        return Computation(name, self._backend.parts_by_torch(self.config.model.spec))

    def shutdown(self) -> None:
        """Disconnect from the other workers and free the memory. Idempotent. Works on a partly initialized worker."""
        self._end_profile()
        self._runner = self._decoder = self._drafting = self._offloaded = None
        self._ranks.leave()
        self._ranks = TensorParallel()
        self._leave_experts()
        for part in (self._source, self._sink, self._token_link, self._workers):
            if part is not None:
                part.close()
        self._source = self._sink = self._token_link = self._workers = None

    def _end_profile(self) -> None:
        """Write the profile that is running, if any. A failure must not keep the worker from stopping."""
        try:
            self.profile(is_start=False)
        except Exception:  # torch and the file system may raise anything
            logger.exception("the profile that was running is lost")

    def _note_step(self, took_s: float, link_s: float) -> None:
        before = self._step_times
        self._step_times = StepTimes(before.computing_s + took_s - link_s, before.link_s + link_s)

    def _waited_s(self) -> float:
        """Return how long this worker has waited for those of other stages."""
        return sum(link.waited_s for link in (self._source, self._sink, self._token_link) if link is not None)

    @property
    def _stage(self) -> Stage:
        """This worker's part of the model."""
        return self.config.stages()[self.rank.pp_rank]

    def _join_engine(self) -> None:
        """Connect to the workers of this engine: to those of the same stage, and to one of each stage beside it."""
        rank = self.rank
        if rank.distributed_init is None:
            raise InvalidConfig(
                f"tp_size={rank.tp_size} and pp_size={rank.pp_size} need distributed_init, the address at which the "
                "engine's workers meet"
            )
        workers = self._workers = self._meet(rank.distributed_init, rank.worker, rank.world_size)
        if rank.tp_size > 1:
            collectives = workers.collectives(
                f"stage {rank.pp_rank}",
                rank.tp_rank,
                rank.tp_size,
                batch_invariant=self.config.model.batch_invariant,
            )
            self._ranks = TensorParallel(rank.tp_rank, rank.tp_size, collectives)
        if rank.pp_rank > 0:
            self._source = self._link(workers, rank.pp_rank - 1, sends=False)
        if rank.pp_rank < rank.pp_size - 1:
            self._sink = self._link(workers, rank.pp_rank, sends=True)
        if rank.pp_size > 1 and not self.config.tells_tokens and rank.pp_rank in (0, rank.pp_size - 1):
            self._token_link = workers.link(
                f"tokens, {rank.tp_rank}",
                sends=rank.is_last_stage,
                capacity_bytes=self.config.scheduler.max_num_seqs * torch.int32.itemsize,
                num_ahead=self._most_steps_in_flight,
            )
        workers.part()

    @property
    def _most_steps_in_flight(self) -> int:
        """How many steps may be in flight, now or once this rank no longer shares experts."""
        return max(self.config.max_steps_in_flight, self.rank.pp_size + 1)

    def _link(self, workers: Rendezvous, stage: int, *, sends: bool) -> Link:
        """Return this worker's end of the link from `stage` to the next one."""
        name = f"from stage {stage} to the next, {self.rank.tp_rank}"
        return workers.link(name, sends=sends, capacity_bytes=self._link_bytes())

    def _link_bytes(self) -> int:
        """Return the size of the hidden states of the largest step."""
        config = self.config
        return config.scheduler.max_num_batched_tokens * config.model.spec.hidden_size * self._dtype.itemsize

    def _join_experts(self) -> None:
        """Connect to the workers of this stage of all engines."""
        rank = self.rank
        if rank.rendezvous is None:
            raise InvalidConfig(
                f"ep_size={rank.ep_size} needs rendezvous, the address at which the workers of all ranks meet"
            )
        self._expert_workers = self._meet_all(rank, self.config.parallel.data_parallel_size)
        self._experts = self._form_group(self._expert_workers, rank)
        self._expert_workers.part()

    def _meet_all(self, rank: WorkerRank, num_ranks: int) -> Rendezvous:
        """Connect to the workers of all stages of all ranks."""
        assert rank.rendezvous is not None, "the ranks share experts"
        return self._meet(rank.rendezvous, rank.dp_rank * rank.world_size + rank.worker, num_ranks * rank.world_size)

    def _form_group(self, workers: Rendezvous, rank: WorkerRank) -> ExpertParallel:
        """Form the group of the workers of this stage."""
        collectives = workers.collectives(
            f"stage {rank.pp_rank}", rank.ep_rank, rank.ep_size, batch_invariant=self.config.model.batch_invariant
        )
        return ExpertParallel(rank.dp_rank, rank.tp_rank, rank.tp_size, collectives, self._device)

    def _leave_experts(self) -> None:
        """Disconnect from the workers that this one shares experts with. Idempotent."""
        if self._experts is not None:
            self._experts.leave()
        if self._expert_workers is not None:
            self._expert_workers.close()
        self._experts = self._expert_workers = None

    def _meet(self, address: str, number: int, size: int) -> Rendezvous:
        return Rendezvous(address, number, size, self._device, self.config.executor.init_timeout_s)

    def _step_bytes(self, config: EngineConfig) -> int:
        """Return an upper bound on the bytes that a step needs in addition to weights and KV cache."""
        scheduler = config.scheduler
        limits = StepLimits(
            num_tokens=scheduler.max_num_batched_tokens,
            num_seqs=scheduler.max_num_seqs,
            max_model_len=scheduler.max_model_len,
            block_size=config.cache.block_size,
            num_samples_per_seq=1 + config.max_drafts,
            num_expert_engines=config.parallel.data_parallel_size if config.parallel.is_lockstep else 1,
        )
        # what a link holds, and what a stage has received
        links = 3 * self._link_bytes() if self.rank.pp_size > 1 else 0
        own = step_bytes(
            config.model.spec,
            limits,
            self.rank.tp_size,
            self._dtype,
            batch_invariant=config.model.batch_invariant,
            native=self._backend.operations_by == "native",
            native_attention=self._backend.attention_by == "native",
        )
        if self._drafting is None:
            return links + own
        kept = self._drafting.kept_bytes(config.model.spec.hidden_size)
        return links + kept + max(own, self._drafting.step_bytes())


class _Unreported:
    """A pending step whose result another worker reports."""

    def __init__(self, step: Pending[StepResult]) -> None:
        self._step = step

    def done(self) -> bool:
        return self._step.done()

    def result(self, timeout: float | None = None) -> None:
        # the worker itself needs the result: its grammars follow the tokens
        self._step.result(timeout)


def _decoder_class(spec: ModelSpec) -> type[Decoder]:
    return Decoder if spec.decoder is None else import_class(f"{spec.architecture}'s decoder", spec.decoder, MODELS)


def _cuda_device(local_rank: int) -> torch.device:
    count = torch.cuda.device_count()
    if count == 0:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise InvalidConfig(
            f"device='cuda', but torch {torch.__version__} sees no GPU here (CUDA_VISIBLE_DEVICES={visible!r}): "
            "install a CUDA build of torch and the GPU's driver on every node with GPUs, or use device='cpu'"
        )
    device = torch.device("cuda", local_rank if local_rank < count else 0)
    torch.cuda.set_device(device)
    return device


def _choose_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    """Return the configured dtype.

    For `auto`, this is the checkpoint's dtype or, if the device has no instructions for that dtype, float32 on a CPU
    and float16 on a GPU.
    """
    chosen = config.model.dtype
    if chosen == "auto":
        chosen = config.model.spec.dtype
        if device.type == "cpu":
            chosen = choose_cpu_dtype(chosen, cpu_features())
        elif chosen == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
            chosen = "float16"
    return getattr(torch, chosen)
