"""A worker's part in drafting: the draft model or the head, and its memory."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raycore.attention.paged_cache import bytes_per_block, make_cache
from raycore.attention.spec import Attention, AttentionSpec, MixerConstants
from raycore.config import EngineConfig
from raycore.decoder.network import Network, Vocabulary
from raycore.errors import InvalidConfig
from raycore.layers.operations import Operations
from raycore.models.spec import ModelSpec
from raycore.parallel.links import Link
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.drafts.checkpoint.eagle3 import Eagle3Spec
from raycore.parts.drafts.checkpoint.mtp import MtpSpec
from raycore.parts.drafts.config.drafter import DrafterConfig, HeadSpec
from raycore.parts.drafts.config.speculative import SpeculativeConfig
from raycore.parts.drafts.decoder.eagle3 import Eagle3Head
from raycore.parts.drafts.decoder.head import DraftingHead
from raycore.parts.drafts.decoder.mtp import MtpHead
from raycore.parts.drafts.guesses.from_tokens import guesses_from_tokens
from raycore.parts.drafts.runner.draft_model import DraftModel
from raycore.parts.drafts.runner.drafter import NO_DRAFTER, Drafter, Drafting, DraftNetwork, StepDrafting
from raycore.parts.drafts.runner.head_drafts import HeadDrafts
from raycore.parts.drafts.runner.rows import num_scratch_blocks
from raycore.parts.drafts.runner.shared_drafts import DraftsOfFirst, own_drafts
from raycore.parts.drafts.runner.stage_states import ReadStage, StageStates
from raycore.parts.drafts.runner.stored_drafts import DraftsAfterSteps, StoredDrafts
from raycore.parts.drafts.runner.token_guesses import SharedDrafts, TokenGuesses
from raycore.parts.drafts.weights.eagle3 import (
    Eagle3Weights,
    eagle3_weight_bytes,
    load_eagle3_weights,
    random_eagle3_weights,
)
from raycore.parts.drafts.weights.mtp import MtpWeights, load_mtp_weights, mtp_weight_bytes, random_mtp_weights
from raycore.runner.compute_threads import ComputeThreads
from raycore.runner.rows import StepRows
from raycore.runner.step_memory import scratch_bytes, step_bytes
from raycore.sampling.sampler import Sampler
from raycore.step.device_batch import DeviceBatch
from raycore.step.memory import StepLimits
from raycore.weights.loader import empty_decoder_weights, load_decoder_weights, random_decoder_weights
from raycore.weights.named import named_weights
from raycore.weights.share import WeightShare
from raycore.worker.attention_backend import choose_attention_backend, choose_cache_dtype, choose_operations_backend
from raycore.worker.compute_backend import ComputeBackend
from raycore.worker.setup import WorkerSetup


class Drafted(NamedTuple):
    """What drafts are made for."""

    target: Network
    batch: DeviceBatch
    rows: StepRows
    """Which rows of a step's layers this worker computes. Drafts it computes alone."""
    sampler: Sampler
    threads: ComputeThreads
    num_blocks: int
    """Of the KV cache. What drafts has as many, and scratch blocks."""
    max_rows: int
    """The largest number of decodes in a step, padding included."""
    links: Sequence[Link] = ()
    """To earlier stages, which get the drafts."""
    sources: Sequence[Link] = ()
    """From the stage before, if there is one."""

    def for_stages(self, drafting: StepDrafting, max_tokens: int) -> Drafting:
        """Return what drafts as `drafting`, for a step that begins on an earlier stage if there is any."""
        return DraftsAfterSteps(drafting, self.links, self.batch, max_tokens) if self.links else drafting

    def of_first(self, ranks: TensorParallel) -> Callable[[Tensor], Tensor]:
        """Return what takes a tensor of every worker of the stage, and returns that of the first one."""
        return lambda x: self.rows.of_first(ranks.all_gather(x)[0])


class Followed(NamedTuple):
    """A stage before the one that drafts."""

    target: Network
    batch: DeviceBatch
    rows: StepRows
    """Which rows of a step's layers this worker computes."""
    sources: Sequence[Link]
    """From the stage before, if there is one."""
    sink: Link
    """To the next stage."""


class DraftWorker:
    """A worker's part in drafting. This one drafts nothing: another worker does, or none."""

    network: Any = None
    """What drafts. None before `load`."""

    def load(self, target: Network) -> None:
        """Read or generate the weights.

        Raises:
            InvalidCheckpoint: a file or a tensor is missing or damaged.
        """

    def unload(self) -> None:
        """Drop the weights."""
        self.network = None

    def weight_bytes(self) -> int:
        """Return the size of all weights on the first worker, as an upper bound."""
        return 0

    def bytes_per_block(self) -> int:
        """Return how many bytes one block of keys and values takes."""
        return 0

    def kept_bytes(self) -> int:
        """Return the bytes that are kept between steps in addition to weights and blocks for requests."""
        return 0

    def step_bytes(self) -> int:
        """Return an upper bound on the bytes that drafting needs while no step runs, in addition to `kept_bytes`."""
        return 0

    def make_drafter(self, drafted: Drafted) -> Drafting:
        """Allocate the blocks for keys and values, and return what drafts."""
        return NO_DRAFTER

    def make_follower(self, followed: Followed) -> Drafting:
        """Return what makes the drafts of the last stage on one before it, too."""
        return NO_DRAFTER


NO_DRAFTING = DraftWorker()


class GuessingWorker(DraftWorker):
    """Drafts from the tokens of requests, on all stages."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config

    def make_drafter(self, drafted: Drafted) -> Drafting:
        return TokenGuesses(guesses_from_tokens(self._config, time.perf_counter), drafted.batch)

    def make_follower(self, followed: Followed) -> Drafting:
        return TokenGuesses(guesses_from_tokens(self._config, time.perf_counter), followed.batch)


class TakingWorker(DraftWorker):
    """Takes the first worker's drafts."""

    def __init__(self, ranks: TensorParallel, device: torch.device, max_tokens: int) -> None:
        """`max_tokens`: maximum length of a draft."""
        self._ranks = ranks
        self._device = device
        self._max_tokens = max_tokens

    def make_drafter(self, drafted: Drafted) -> Drafting:
        share = DraftsOfFirst(drafted.of_first(self._ranks), self._device)
        return drafted.for_stages(SharedDrafts(share), self._max_tokens)


class FollowingWorker(DraftWorker):
    """On a stage before the one that has the model: takes its drafts."""

    def __init__(self, config: EngineConfig, drafter: DrafterConfig, dtype: torch.dtype) -> None:
        self._max_rows = config.scheduler.max_num_batched_tokens
        self._drafter = drafter
        layers = [] if drafter.head is None else drafter.head.target_layers
        self._row_bytes = len(layers) * config.model.spec.hidden_size * dtype.itemsize

    def kept_bytes(self) -> int:
        """Return those of what a head reads, twice: it is copied for the next stage."""
        return 2 * self._max_rows * self._row_bytes

    def make_follower(self, followed: Followed) -> Drafting:
        sizes, head = (len(followed.batch.host.num_known), self._drafter.num_speculative_tokens), self._drafter.head
        if head is None:
            return StoredDrafts(*sizes)
        of_target = followed.target, head.target_layers, followed.sources, followed.rows
        states = StageStates(*of_target, self._max_rows, followed.batch.device)
        return ReadStage(states, followed.sink, *sizes)


class NetworkDrafts(DraftWorker, ABC):
    """Drafts by a network with keys and values of its own."""

    def __init__(
        self,
        config: EngineConfig,
        drafter: DrafterConfig,
        ranks: TensorParallel,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """
        Args:
            ranks: the workers that share the target.

        Raises:
            InvalidConfig: the network can't be computed with the configured attention backend or kv_cache_dtype.
        """
        self._config = config
        self._drafter = drafter
        self._all_ranks = ranks
        self._ranks = ranks if drafter.tensor_parallel_size > 1 else TensorParallel()
        self._device = device
        self._dtype = dtype
        heads = drafter.spec.attentions[0].heads(drafter.spec, self._ranks.size)
        model, block_size = config.model, config.tokens_per_block
        try:
            attention = choose_attention_backend(model.attention_backend, device, [heads], block_size, dtype)
            cache_dtype = choose_cache_dtype(config.cache.kv_cache_dtype, attention, device, dtype, heads)
        except InvalidConfig as error:
            raise InvalidConfig(f"the draft model can't be computed: {error}") from error
        operations = choose_operations_backend(model.attention_backend, device)
        self._backend = ComputeBackend(operations, attention, device, model.batch_invariant, cache_dtype)
        self._share = WeightShare(drafter.spec, dtype, self._ranks.rank, self._ranks.size, device=device)

    def bytes_per_block(self) -> int:
        spec, block_size = self._drafter.spec, self._limits.block_size
        heads = spec.attentions[0].heads(spec, self._ranks.size)
        return bytes_per_block(heads, spec.num_layers, block_size, self._backend.cache_dtype)

    def kept_bytes(self) -> int:
        """Return those of scratch blocks, and of the scratch memory of attention."""
        kept = self._num_scratch_blocks * self.bytes_per_block()
        if self._backend.attention_by != "torch":
            return kept
        sizes = self._ranks.size, self._dtype, self._backend.batch_invariant
        return kept + scratch_bytes(self._drafter.spec, self._limits, *sizes)

    def step_bytes(self) -> int:
        return step_bytes(
            self._drafter.spec,
            self._limits,
            self._ranks.size,
            self._dtype,
            batch_invariant=self._backend.batch_invariant,
            native=self._backend.operations_by == "native",
            native_attention=self._backend.attention_by == "native",
        )

    def make_drafter(self, drafted: Drafted) -> Drafting:
        config, is_shared = self._config, self._ranks.size == self._all_ranks.size
        if is_shared and config.parallel.prefill_context_parallel_size == 1:
            share = own_drafts
        else:
            share = DraftsOfFirst(drafted.of_first(self._all_ranks), self._device)
        drafter = Drafter(
            self._make_network(drafted),
            drafted.batch,
            drafted.sampler,
            max_model_len=self._drafter.max_model_len,
            share=share,
            **self._sizes(drafted),
        )
        return drafted.for_stages(drafter, self._drafter.num_speculative_tokens)

    @abstractmethod
    def _make_network(self, drafted: Drafted) -> DraftNetwork:
        """Return what computes logits."""

    def _sizes(self, drafted: Drafted) -> dict[str, int]:
        return {
            "max_tokens": self._drafter.num_speculative_tokens,
            "block_size": self._limits.block_size,
            "num_blocks": drafted.num_blocks,
        }

    def _make_attention(self, constants: Sequence[MixerConstants], drafted: Drafted) -> Attention:
        """Allocate the blocks for keys and values. `constants`: of the network's layers."""
        limits, model = self._limits, self._drafter.spec
        spec = AttentionSpec.of(model, self._ranks.size, constants, limits.max_model_len, self._dtype, self._device)
        kv = make_cache(
            spec.heads,
            model.num_layers,
            drafted.num_blocks + self._num_scratch_blocks,
            limits.block_size,
            self._backend.cache_dtype,
            self._device,
        )
        return self._backend.attention(
            spec, kv, max_model_len=limits.max_model_len, max_num_seqs=limits.num_seqs, max_rows=drafted.max_rows
        )

    @property
    def _limits(self) -> StepLimits:
        scheduler = self._config.scheduler
        return StepLimits(
            num_tokens=scheduler.max_num_batched_tokens,
            num_seqs=scheduler.max_num_seqs,
            max_model_len=scheduler.max_model_len,
            # this worker has the keys and values of all tokens, though it may have only some of the target's
            block_size=self._config.tokens_per_block,
        )

    @property
    def _num_scratch_blocks(self) -> int:
        per_slot = num_scratch_blocks(self._drafter.num_speculative_tokens, self._limits.block_size)
        return self._config.scheduler.max_num_seqs * per_slot

    @property
    def _whole_share(self) -> WeightShare:
        """What the first worker holds, without memory."""
        return replace(self._share, tp_rank=0, device=torch.device("meta"))


class DraftModelWorker(NetworkDrafts):
    """Drafts by a draft model."""

    network: Network | None

    def __init__(self, make_network: Callable[..., Network], *drafter: Any) -> None:
        """`make_network`: the class of the draft model. The other arguments are those of `NetworkDrafts`."""
        super().__init__(*drafter)
        self._make = make_network

    def load(self, target: Network) -> None:
        model = self._config.model
        if model.load_format == "dummy":
            weights = random_decoder_weights(self._share, model.seed)
        else:
            weights = load_decoder_weights(self._share, Path(self._drafter.path))
        with torch.inference_mode():
            self.network = self._make(self._drafter.spec, weights, self._ranks, self._backend.operations())

    def weight_bytes(self) -> int:
        weights = empty_decoder_weights(self._whole_share)
        return sum(
            each.nbytes if isinstance(each, Tensor) else each.numel() * self._dtype.itemsize
            for _, each in named_weights(weights)
        )

    def _make_network(self, drafted: Drafted) -> DraftModel:
        assert self.network is not None, "load() comes first"
        attention = self._make_attention(self.network.constants, drafted)
        sizes = self._sizes(drafted) | {"max_step_tokens": self._limits.num_tokens}
        return DraftModel(self.network, attention, drafted.batch, drafted.threads, **sizes)


class HeadWorker(NetworkDrafts):
    """Drafts by a head, which reads the target's hidden states."""

    network: DraftingHead | None

    def __init__(self, head: HeadSpec, *drafter: Any) -> None:
        """`drafter`: the arguments of `NetworkDrafts`."""
        super().__init__(*drafter)
        self._target_layers = head.target_layers

    def load(self, target: Network) -> None:
        model, path = self._config.model, Path(self._drafter.path)
        seed = model.seed if model.load_format == "dummy" else None
        weights = self._make_weights(path, seed)
        with torch.inference_mode():
            self.network = self._make_head(weights, self._backend.operations(), target.vocabulary)

    def kept_bytes(self) -> int:
        """Return the same as without a head, and those of what it reads of the target."""
        limits = self._limits
        numbers = limits.num_tokens * self._config.model.spec.hidden_size * len(self._target_layers)
        num_more = self._drafter.spec.num_layers - 1
        rows = (1 + num_more) * limits.num_seqs + num_more * limits.num_tokens
        return super().kept_bytes() + (numbers + rows * self._drafter.spec.hidden_size) * self._dtype.itemsize

    def step_bytes(self) -> int:
        # a head's input has two halves, and one more copy; what layers pass on to the next one, two more
        num_copies = 4 + 2 * (self._drafter.spec.num_layers > 1)
        inputs = self._limits.num_tokens * num_copies * self._drafter.spec.hidden_size * self._dtype.itemsize
        return super().step_bytes() + inputs

    @abstractmethod
    def _make_weights(self, path: Path, seed: int | None) -> Any:
        """Return the weights at `path`, or random ones from a seed."""

    @abstractmethod
    def _make_head(self, weights: Any, operations: Operations, vocabulary: Vocabulary) -> DraftingHead:
        """Return the head with these weights. `vocabulary`: the target's."""

    def _make_network(self, drafted: Drafted) -> HeadDrafts:
        assert self.network is not None, "load() comes first"
        attention = self._make_attention(self.network.constants, drafted)
        max_tokens = max(self._limits.num_tokens, drafted.max_rows)
        of_target = drafted.target, self._target_layers, attention, drafted.batch, drafted.rows, drafted.threads
        return HeadDrafts(self.network, *of_target, max_step_tokens=max_tokens, links=drafted.sources)


class Eagle3Worker(HeadWorker):
    """Drafts by an EAGLE-3 head."""

    def __init__(self, head: Eagle3Spec, *drafter: Any) -> None:
        super().__init__(head, *drafter)
        self._head = head

    def weight_bytes(self) -> int:
        """Return the size of all weights, with an embedding of the head's own."""
        return eagle3_weight_bytes(self._whole_share, self._head)

    def _make_weights(self, path: Path, seed: int | None) -> Eagle3Weights:
        of_share = self._share, self._head
        return load_eagle3_weights(*of_share, path) if seed is None else random_eagle3_weights(*of_share, seed)

    def _make_head(self, weights: Eagle3Weights, operations: Operations, vocabulary: Vocabulary) -> Eagle3Head:
        return Eagle3Head(self._drafter.spec, self._head, weights, self._ranks, operations, vocabulary.embed)


class MtpWorker(HeadWorker):
    """Drafts by a head that the target's checkpoint has."""

    def __init__(self, head: MtpSpec, *drafter: Any) -> None:
        super().__init__(head, *drafter)
        self._head = head

    def weight_bytes(self) -> int:
        return mtp_weight_bytes(self._whole_share, self._head)

    def _make_weights(self, path: Path, seed: int | None) -> list[MtpWeights]:
        of_share = self._share, self._head
        return load_mtp_weights(*of_share, path) if seed is None else random_mtp_weights(*of_share, seed)

    def _make_head(self, weights: list[MtpWeights], operations: Operations, vocabulary: Vocabulary) -> MtpHead:
        return MtpHead(self._drafter.spec, self._head, weights, self._ranks, operations, vocabulary)


def make_draft_worker(
    setup: WorkerSetup, ranks: TensorParallel, make_network: Callable[[ModelSpec], Callable[..., Network]]
) -> DraftWorker:
    """Return a worker's part in drafting. If one tensor-parallel rank is enough, that is the first one.

    Args:
        ranks: the workers that share the target.
        make_network: returns the class of a model.

    Raises:
        InvalidConfig: as the constructor of `NetworkDrafts`.
    """
    config, drafter, rank = setup.config, setup.config.drafter, setup.rank
    if drafter is None:
        speculative = config.speculative_config if config.workers_draft else None
        return NO_DRAFTING if speculative is None else GuessingWorker(speculative)
    if not rank.is_last_stage:
        return FollowingWorker(config, drafter, setup.dtype)
    if drafter.tensor_parallel_size < rank.tp_size and rank.tp_rank > 0:
        sizes = setup.device, drafter.num_speculative_tokens
        return TakingWorker(ranks, *sizes) if config.workers_draft else NO_DRAFTING
    of_worker = setup.config, drafter, ranks, setup.device, setup.dtype
    match drafter.head:
        case Eagle3Spec() as head:
            return Eagle3Worker(head, *of_worker)
        case MtpSpec() as head:
            return MtpWorker(head, *of_worker)
        case None:
            pass
    return DraftModelWorker(make_network(drafter.spec), *of_worker)
