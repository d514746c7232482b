"""How much memory the parts of a worker take, and how much of it is left for the KV cache. All sizes are in bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from raycore.cache_layout import CacheLayout, WorkerCacheSpec
from raycore.errors import InvalidConfig
from raycore.node import resources as host
from raycore.parts.adapters.weights import largest_lora_bytes
from raycore.parts.drafts.worker import DraftWorker
from raycore.runner.step_memory import step_bytes
from raycore.step.memory import StepLimits
from raycore.weights.loader import empty_decoder_weights
from raycore.weights.named import named_weights
from raycore.worker.cache_specs import expected_layout, worker_cache_spec
from raycore.worker.gpu_memory import MemoryUse
from raycore.worker.setup import WorkerSetup
from raycore.worker.states import worker_state_bytes

_MAX_DEFAULT_CACHE_BYTES = 4 << 30
"""Maximum default size of a worker's KV cache on a CPU, where other programs use the same memory."""
_DEFAULT_CPU_FRACTION = 0.5
"""Of the memory that a worker on a CPU finds available: its default KV cache, times `gpu_memory_utilization`."""
_GRAPH_BYTES = 256 << 20
"""Set aside on a GPU for the memory of CUDA graphs, which are captured later."""


@dataclass(frozen=True)
class MemorySizes:
    """The sizes of one worker's parts."""

    setup: WorkerSetup
    drafting: DraftWorker

    @property
    def cache_spec(self) -> WorkerCacheSpec:
        """What the worker keeps in the blocks of the KV cache."""
        return worker_cache_spec(self.setup, self.drafting.bytes_per_block())

    @property
    def layout(self) -> CacheLayout:
        """How layers share blocks."""
        return expected_layout(self.setup)

    @property
    def block(self) -> int:
        """One block of the KV cache."""
        return self.layout.block_bytes(self.cache_spec)

    @property
    def adapters(self) -> int:
        """What all LoRA adapters may take."""
        lora = self.setup.config.lora
        return lora.num_slots * largest_lora_bytes(self.setup.share, lora.max_lora_rank) if lora.enable_lora else 0

    @property
    def states(self) -> int:
        """All rows of states."""
        return worker_state_bytes(self.setup)

    @property
    def images(self) -> int:
        """The embeddings of images or prompts that are kept, and what the largest image needs while it is encoded."""
        limits, spec = self.setup.config.encoder_limits, self.setup.config.model.spec
        vision = spec.vision
        if limits is None or not self.setup.share.is_first:
            return 0
        if vision is None:
            # and the values that they are made of, one feature after the other
            values = limits.max_feature_tokens * 2 * torch.float32.itemsize
            return spec.hidden_size * (limits.cache_size * self.setup.dtype.itemsize + values)
        from raycore.parts.images.vision.memory import (  # imported lazily: most models see no images
            encoder_bytes,
            kept_bytes,
        )

        dtype = self.setup.dtype
        return kept_bytes(vision, limits.cache_size, dtype) + encoder_bytes(vision, limits.max_feature_tokens, dtype)

    @property
    def step(self) -> int:
        """An upper bound on what a step needs in addition to weights and KV cache."""
        setup, config, backend = self.setup, self.setup.config, self.setup.backend
        limits = StepLimits(
            num_tokens=config.scheduler.max_num_batched_tokens,
            num_seqs=config.scheduler.max_num_seqs,
            max_model_len=config.scheduler.max_model_len,
            block_size=config.cache.block_size,
            num_samples_per_seq=1 + config.max_drafts,
            num_expert_engines=config.parallel.num_sharing,
            context_size=config.parallel.context_parallel_size,
            num_query_parts=config.parallel.decode_context_parallel_size,
            processes_all_logits=config.has_logits_processors,
        )
        # what a link holds, and what a stage has received
        links = 3 * setup.hidden_bytes if setup.rank.pp_size > 1 else 0
        own = step_bytes(
            config.model.spec,
            limits,
            setup.rank.tp_size,
            setup.dtype,
            batch_invariant=config.model.batch_invariant,
            native=backend.operations_by == "native",
            native_attention=backend.attention_by == "native",
            windows=self.layout.windows if self.layout.num_groups > 1 else None,
        )
        return links + self.drafting.kept_bytes() + max(own, self.drafting.step_bytes())

    @property
    def weights(self) -> int:
        """All weights of the model, in the data types that they travel in.

        A CPU's kernels may need fewer bytes, because they shorten weights.
        """
        total = 0
        for _, tensor in named_weights(empty_decoder_weights(replace(self.setup.share, device=torch.device("meta")))):
            assert isinstance(tensor, torch.Tensor), "weights aren't quantized where experts move between ranks"
            total += tensor.nbytes
        return total

    def more_for(self, num_ranks: int, num_blocks: int) -> int:
        """Return how much more the worker needs if `num_ranks` ranks share experts. Negative: it needs less.

        `num_blocks`: size of the KV cache, which counts if the worker is new.
        """
        after = MemorySizes(self.setup.with_ranks(num_ranks, None), self.drafting)
        needed = after.weights + after.step
        if not self.setup.rank.is_new:
            return needed - self.weights - self.step
        return needed + num_blocks * self.block + self.states + self.adapters + self.drafting.weight_bytes()

    def check_cache(self) -> None:
        """Raise InvalidConfig if the configured KV cache is larger than the memory."""
        device = self.setup.device
        if device.type == "cuda":
            memory = 1, torch.cuda.mem_get_info(device)[1], f"GPU {device}"
        else:
            memory = self.setup.rank.num_local_workers, host.total_memory_bytes(), "this node"
        self.setup.config.cache.check_memory(*memory, self.block)

    def cache_on_cpu(self, available: int) -> int:
        """Return the default size of the KV cache on a node with `available` bytes for all workers.

        Raises:
            InvalidConfig: it is less than one block.
        """
        config = self.setup.config
        per_worker = available // self.setup.rank.num_local_workers - self.step - self.adapters - self.images
        fraction = config.cache.gpu_memory_utilization * _DEFAULT_CPU_FRACTION
        size = min(int(per_worker * fraction), _MAX_DEFAULT_CACHE_BYTES) - self.states
        if size < self.block:
            raise InvalidConfig(
                f"not enough memory for the KV cache on {self.setup.device}: {size} bytes are available, and one block "
                f"takes {self.block}{self._about_states}. Free memory, set the cache's size (kv_cache_memory_bytes), "
                f"or lower max_num_batched_tokens={config.scheduler.max_num_batched_tokens}"
            )
        return size

    def cache_as_configured(self, num_bytes: int) -> int:
        """Return what `kv_cache_memory_bytes` leaves for blocks. Raises InvalidConfig if it is less than one."""
        left = num_bytes - self.states
        if self.states and left < self.block:
            raise InvalidConfig(
                f"kv_cache_memory_bytes={num_bytes} leaves {left} bytes for blocks of {self.block}{self._about_states}"
            )
        return left

    @property
    def _about_states(self) -> str:
        rows = self.setup.config.state_rows
        if rows is None:
            return ""
        drafts = "" if rows.rows_per_slot == 1 else f", with {rows.rows_per_slot} for each because of drafts"
        return (
            f", after {rows.total} states of {self.states // rows.total} bytes: those of max_num_seqs={rows.num_slots} "
            f"requests{drafts}, and num_prefix_states={rows.num_prefixes}. Lower one of these"
        )

    def cache_on_gpu(self, run_steps: Callable[[], None]) -> int:
        """Return the default size of the KV cache on a GPU that has the weights, and nothing else of the worker.

        `run_steps`: runs the steps that need the most memory, and gives up what only they need.

        Raises:
            InvalidConfig: it is less than one block. The message has a table of what takes the memory.
        """
        device = self.setup.device
        weights = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run_steps()
        step = torch.cuda.max_memory_allocated(device) - weights - self.states
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        use = MemoryUse(
            total=total,
            utilization=self.setup.config.cache.gpu_memory_utilization,
            free=free,
            weights=weights,
            adapters=self.adapters,
            states=self.states,
            step=step,
            images=self.images,
            graphs=_GRAPH_BYTES if self.setup.has_graphs else 0,
        )
        if use.left < self.block:
            raise InvalidConfig(f"not enough memory for the KV cache on {device}:\n{use.table()}")
        return use.left


def free_bytes(device: torch.device) -> int:
    """Return how much a worker could allocate now."""
    if device.type != "cuda":
        return host.available_memory_bytes()
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused
