"""What a worker decides before it loads anything: its device, its data type, its kernels, and its part of the model."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from typing import cast

import torch

from raycore.checkpoint.stages import Stage
from raycore.config import DType, EngineConfig
from raycore.errors import InvalidConfig
from raycore.kernels import library as kernels
from raycore.messages import Computation
from raycore.node import resources as host
from raycore.node.cpu_features import cpu_features
from raycore.node.versions import hardware
from raycore.parts.experts.models import ExpertShare, experts_of
from raycore.weights.linear_formats import LinearFormats
from raycore.weights.share import WeightShare
from raycore.worker.attention_backend import (
    choose_attention_backend,
    choose_cache_dtype,
    choose_divided_backend,
    choose_operations_backend,
)
from raycore.worker.compute_backend import ComputeBackend
from raycore.worker.cpu_dtype import choose_cpu_dtype
from raycore.worker.format_choice import choose_formats
from raycore.worker.rank import WorkerRank

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerSetup:
    """A worker's decisions, and what follows from them."""

    config: EngineConfig
    rank: WorkerRank
    device: torch.device
    dtype: torch.dtype
    max_threads: int
    """Number of compute threads, on a CPU."""
    backend: ComputeBackend
    formats: LinearFormats
    """Of the linear layers' weights."""

    @property
    def dtype_name(self) -> DType:
        """The name of the data type, such as `bfloat16`."""
        return cast(DType, str(self.dtype).removeprefix("torch."))

    @property
    def stage(self) -> Stage:
        """The worker's part of the model."""
        return self.config.stages()[self.rank.pp_rank]

    @property
    def experts(self) -> ExpertShare | None:
        """The whole experts that the worker holds with expert parallelism; otherwise None.

        A worker whose rank leaves holds none.
        """
        rank = self.rank
        if not self.config.parallel.enable_expert_parallel:
            return None
        share = experts_of(self.config.model.spec).whole_experts(rank.ep_rank, rank.ep_size)
        return share if rank.ep_rank < rank.ep_size else share._replace(experts=range(0))

    @property
    def share(self) -> WeightShare:
        """What the worker holds of the model's weights."""
        spec, rank = self.config.model.spec, self.rank
        return WeightShare(
            *(spec, self.dtype, rank.tp_rank, rank.tp_size, self.stage, self.experts, self.device, self.formats),
            embeds=rank.is_last_stage and self.config.reads_hidden_states,
        )

    @property
    def hidden_bytes(self) -> int:
        """Size of the hidden states of the largest step, which stages send to each other."""
        config = self.config
        return config.scheduler.max_num_batched_tokens * config.model.spec.hidden_size * self.dtype.itemsize

    @property
    def most_steps_in_flight(self) -> int:
        """How many steps may be in flight, now or once the worker's rank no longer shares experts."""
        return max(self.config.max_steps_in_flight, self.rank.pp_size + 1)

    @property
    def has_graphs(self) -> bool:
        """Whether steps of decodes run as CUDA graphs.

        Ranks that share experts have other sizes in every step, and the steps of stages begin or end at a link.
        Workers that divide contexts exchange parts in each layer.
        Where states are read and written is a new number in every step. transformers' code may ask the device for
        values, which graphs can't. Models that pool, and encoders of images alone, have no decodes.
        """
        model = self.config.model
        is_eager = (
            model.enforce_eager
            or self.config.parallel.is_lockstep
            or self.config.parallel.context_parallel_size > 1
            or model.spec.why_not("graphs") is not None
            or model.spec.implementation == "transformers"
            or model.spec.pooling is not None
            or model.spec.encodes_only
        )
        return self.backend.attention_by == "triton" and not is_eager and self.rank.pp_size == 1

    @property
    def computation(self) -> Computation:
        """What computes the model."""
        backend = self.backend.operations_by
        name = f"native ({kernels.load()})" if backend == "native" else backend
        return Computation(name, self.backend.parts_by_torch(self.config.model.spec))

    def with_ranks(self, num_ranks: int, rendezvous: str | None) -> WorkerSetup:
        """Return the same setup for another number of ranks that share experts and meet at `rendezvous`."""
        config = self.config.with_num_ranks(num_ranks)
        return replace(self, config=config, rank=self.rank.with_experts(config.parallel, rendezvous))

    def describe_device(self) -> str:
        """Return the device and the software that computes on it, as text for the log."""
        computation = self.computation
        software = f"torch {torch.__version__}, backend {computation.backend}"
        if computation.parts_by_torch:
            software += f", by plain torch: {', '.join(computation.parts_by_torch)}"
        if self.device.type == "cuda":
            return f"{torch.cuda.get_device_name(self.device)}: {software}"
        return f"{hardware()}: {software}, up to {self.max_threads} threads"


def set_up(config: EngineConfig, rank: WorkerRank) -> WorkerSetup:
    """Decide, and set what the whole process has: its GPU, or the number of torch's threads.

    Raises:
        InvalidConfig: the configured device, attention backend, quantization or kv_cache_dtype is not available.
    """
    device, max_threads = _choose_device(config, rank)
    dtype = _choose_dtype(config, device)
    model, cache, spec = config.model, config.cache, config.model.spec
    shapes = [each.heads(spec, rank.tp_size) for each in spec.attentions]
    # a worker attends for all that have other tokens' keys of the same heads
    attending = [replace(heads, num_heads=heads.num_heads * rank.dcp_size) for heads in shapes]
    operations = choose_operations_backend(model.attention_backend, device)
    attention = choose_attention_backend(model.attention_backend, device, attending, cache.block_size, dtype)
    if config.parallel.context_parallel_size > 1:
        attention = choose_divided_backend(attention, model.attention_backend, spec)
    cache_dtype = choose_cache_dtype(cache.kv_cache_dtype, attention, device, dtype, shapes[0])
    vision = model.spec.vision
    if model.batch_invariant and attention != "native" and vision is not None and vision.is_bidirectional:
        raise InvalidConfig(
            f"batch_invariant=True needs native kernels for {model.spec.architecture}, in which an image's tokens see "
            "each other: use a CPU with them, without context parallelism, or omit it"
        )
    backend = ComputeBackend(operations, attention, device, model.batch_invariant, cache_dtype)
    no_graphs = model.spec.why_not("graphs")
    if device.type == "cuda" and no_graphs is not None and not model.enforce_eager:
        logger.info("no CUDA graphs, so decoding is slower: the model %s", no_graphs)
    shares_experts = config.parallel.enable_expert_parallel
    formats = choose_formats(
        model, rank.tp_size, device, is_native=operations == "native", shares_experts=shares_experts
    )
    return WorkerSetup(config, rank, device, dtype, max_threads, backend, formats)


def gpu_id(device: torch.device) -> str:
    """Return a GPU's entry in `CUDA_VISIBLE_DEVICES`, or its index if that variable is not set."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[device.index] if visible else str(device.index)


def _choose_device(config: EngineConfig, rank: WorkerRank) -> tuple[torch.device, int]:
    """Return the device, and the number of threads that compute."""
    if config.device == "cuda":
        return _cuda_device(rank.local_rank), 1
    host.keep_freed_memory()
    max_threads = config.executor.num_threads or max(1, host.usable_cores() // rank.num_local_workers)
    torch.set_num_threads(max_threads)
    return torch.device("cpu"), max_threads


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
