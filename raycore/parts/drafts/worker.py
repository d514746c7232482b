"""A worker's part in drafting: the draft model or the head, and its memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from raycore.attention.paged_cache import bytes_per_block, make_cache
from raycore.attention.spec import Attention, AttentionSpec
from raycore.config import EngineConfig
from raycore.decoder.network import Network
from raycore.errors import InvalidConfig
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.drafts.checkpoint import Eagle3Spec
from raycore.parts.drafts.config.drafter import DrafterConfig
from raycore.parts.drafts.decoder import Eagle3Head
from raycore.parts.drafts.runner.draft_model import DraftModel
from raycore.parts.drafts.runner.drafter import Drafter
from raycore.parts.drafts.runner.eagle3 import Eagle3
from raycore.parts.drafts.runner.rows import num_scratch_blocks
from raycore.parts.drafts.weights import eagle3_weight_bytes, load_eagle3_weights, random_eagle3_weights
from raycore.runner.compute_threads import ComputeThreads
from raycore.runner.step_memory import scratch_bytes, step_bytes
from raycore.sampling.sampler import Sampler
from raycore.step.device_batch import DeviceBatch
from raycore.step.memory import StepLimits
from raycore.weights.loader import empty_decoder_weights, load_decoder_weights, random_decoder_weights
from raycore.weights.named import named_weights
from raycore.weights.share import WeightShare
from raycore.worker.attention_backend import choose_attention_backend, choose_cache_dtype, choose_operations_backend
from raycore.worker.compute_backend import ComputeBackend


class DraftWorker:
    """The draft model or the head of one worker. Call `load` before `make_drafter`."""

    def __init__(
        self,
        config: EngineConfig,
        drafter: DrafterConfig,
        ranks: TensorParallel,
        device: torch.device,
        dtype: torch.dtype,
        make_network: Callable[..., Network],
    ) -> None:
        """
        Args:
            ranks: the workers that share the target.
            make_network: the class of the draft model.

        Raises:
            InvalidConfig: the draft model can't be computed with the configured attention backend or kv_cache_dtype.
        """
        self._config = config
        self._drafter = drafter
        self._ranks = ranks if drafter.tensor_parallel_size > 1 else TensorParallel()
        self._device = device
        self._dtype = dtype
        self._make_network = make_network
        heads = drafter.spec.attention.heads(drafter.spec, self._ranks.size)
        model, block_size = config.model, config.cache.block_size
        try:
            attention = choose_attention_backend(model.attention_backend, device, heads, block_size, dtype)
            cache_dtype = choose_cache_dtype(config.cache.kv_cache_dtype, attention, device, dtype, heads)
        except InvalidConfig as error:
            raise InvalidConfig(f"the draft model can't be computed: {error}") from error
        operations = choose_operations_backend(model.attention_backend, device)
        self._backend = ComputeBackend(operations, attention, device, model.batch_invariant, cache_dtype)
        self._share = WeightShare(drafter.spec, dtype, self._ranks.rank, self._ranks.size, device=device)
        self._network: Network | Eagle3Head | None = None

    @property
    def network(self) -> Network | Eagle3Head | None:
        """The draft model or the head. None before `load`."""
        return self._network

    def load(self, target: Network) -> None:
        """Read or generate the weights.

        Raises:
            InvalidCheckpoint: a file or a tensor is missing or damaged.
        """
        self._network = (
            self._load_model() if self._drafter.head is None else self._load_head(self._drafter.head, target)
        )

    def _load_model(self) -> Network:
        model = self._config.model
        if model.load_format == "dummy":
            weights = random_decoder_weights(self._share, model.seed)
        else:
            weights = load_decoder_weights(self._share, Path(self._drafter.path))
        with torch.inference_mode():
            return self._make_network(self._drafter.spec, weights, self._ranks, self._backend.operations())

    def _load_head(self, head: Eagle3Spec, target: Network) -> Eagle3Head:
        model = self._config.model
        if model.load_format == "dummy":
            weights = random_eagle3_weights(self._share, head, model.seed)
        else:
            weights = load_eagle3_weights(self._share, head, Path(self._drafter.path))
        with torch.inference_mode():
            return Eagle3Head(
                self._drafter.spec, head, weights, self._ranks, self._backend.operations(), target.vocabulary.embed
            )

    def unload(self) -> None:
        """Drop the weights."""
        self._network = None

    def weight_bytes(self) -> int:
        """Return the size of all weights on the first worker. An Eagle-3 head may have fewer."""
        share = replace(self._share, tp_rank=0, device=torch.device("meta"))
        if self._drafter.head is not None:
            return eagle3_weight_bytes(share, self._drafter.head)
        weights = empty_decoder_weights(share)
        return sum(tensor.numel() * self._dtype.itemsize for _, tensor in named_weights(weights))

    def bytes_per_block(self) -> int:
        """Return how many bytes one block of the draft model's keys and values takes."""
        spec, block_size = self._drafter.spec, self._config.cache.block_size
        heads = spec.attention.heads(spec, self._ranks.size)
        return bytes_per_block(heads, spec.num_layers, block_size, self._backend.cache_dtype)

    def kept_bytes(self, target_hidden_size: int) -> int:
        """Return the bytes that are kept between steps in addition to weights and blocks for requests.

        These are scratch blocks, the scratch memory of attention, and what a head reads of the target.
        """
        limits, head, spec = self._limits, self._drafter.head, self._drafter.spec
        kept = self._num_scratch_blocks * self.bytes_per_block()
        if self._backend.attention_by == "torch":
            kept += scratch_bytes(spec, limits, self._ranks.size, self._dtype, self._backend.batch_invariant)
        if head is not None:
            numbers = limits.num_tokens * target_hidden_size * len(head.target_layers)
            kept += (numbers + limits.num_seqs * spec.hidden_size) * self._dtype.itemsize
        return kept

    def step_bytes(self) -> int:
        """Return an upper bound on the bytes that drafting needs while no step runs, in addition to `kept_bytes`."""
        own = step_bytes(
            self._drafter.spec,
            self._limits,
            self._ranks.size,
            self._dtype,
            batch_invariant=self._backend.batch_invariant,
            native=self._backend.operations_by == "native",
            native_attention=self._backend.attention_by == "native",
        )
        if self._drafter.head is None:
            return own
        # a head's input has two halves, and one more copy
        return own + self._limits.num_tokens * 4 * self._drafter.spec.hidden_size * self._dtype.itemsize

    def make_drafter(
        self,
        target: Network,
        batch: DeviceBatch,
        sampler: Sampler,
        threads: ComputeThreads,
        num_blocks: int,
        max_rows: int,
    ) -> Drafter:
        """Allocate `num_blocks` blocks for keys and values, and scratch blocks, and return what drafts.

        `max_rows`: the largest number of decodes in a step, padding included.
        """
        drafter, network = self._drafter, self._network
        assert network is not None, "load() comes first"
        attention = self._make_attention(network, num_blocks, max_rows)
        max_step_tokens = max(self._limits.num_tokens, max_rows)
        sizes = {
            "max_tokens": drafter.num_speculative_tokens,
            "block_size": self._limits.block_size,
            "num_blocks": num_blocks,
        }
        if isinstance(network, Eagle3Head):
            assert drafter.head is not None
            layers = drafter.head.target_layers
            drafting = Eagle3(network, target, layers, attention, batch, threads, max_step_tokens=max_step_tokens)
        else:
            drafting = DraftModel(network, attention, batch, threads, max_step_tokens=self._limits.num_tokens, **sizes)
        return Drafter(drafting, batch, sampler, **sizes)

    def _make_attention(self, network: Network | Eagle3Head, num_blocks: int, max_rows: int) -> Attention:
        """Allocate the blocks for keys and values. `max_rows`: the largest number of decodes in a step."""
        limits, model = self._limits, self._drafter.spec
        spec = AttentionSpec.of(
            model,
            self._ranks.size,
            network.qk_norms_NH,
            limits.max_model_len,
            self._dtype,
            self._device,
            sinks_N=network.sinks_N,
        )
        kv = make_cache(
            spec.heads,
            model.num_layers,
            num_blocks + self._num_scratch_blocks,
            limits.block_size,
            self._backend.cache_dtype,
            self._device,
        )
        return self._backend.attention(
            spec, kv, max_model_len=limits.max_model_len, max_num_seqs=limits.num_seqs, max_rows=max_rows
        )

    @property
    def _limits(self) -> StepLimits:
        scheduler = self._config.scheduler
        return StepLimits(
            num_tokens=scheduler.max_num_batched_tokens,
            num_seqs=scheduler.max_num_seqs,
            max_model_len=scheduler.max_model_len,
            block_size=self._config.cache.block_size,
        )

    @property
    def _num_scratch_blocks(self) -> int:
        per_slot = num_scratch_blocks(self._drafter.num_speculative_tokens, self._config.cache.block_size)
        return self._config.scheduler.max_num_seqs * per_slot
