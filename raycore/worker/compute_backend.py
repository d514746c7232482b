"""Makes the operations and the attention of a model, by the backends that were chosen for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch

from raycore.attention.batch_invariant import BatchInvariantAttention
from raycore.attention.block_selection import BlockRowAttention, BlockSelection
from raycore.attention.chunked import ChunkedAttention
from raycore.attention.context_share import ContextShare
from raycore.attention.divided import DividedAttention, PartialAttention
from raycore.attention.gather import GatherAttention
from raycore.attention.grouped import GroupedAttention, LayerPlace
from raycore.attention.kv_tensors import KVTensors
from raycore.attention.latent import TorchLatentAttention, TorchPartialLatentAttention
from raycore.attention.latent_tensors import LatentTensors
from raycore.attention.native import NativeAttention, NativePartialAttention
from raycore.attention.native_latent import NativeLatentAttention, NativePartialLatentAttention
from raycore.attention.paged_cache import PagedCache
from raycore.attention.prepared import PreparedAttention
from raycore.attention.scratch import GatherScratch
from raycore.attention.selected import NativeRowAttention, SelectedAttention, TorchRowAttention
from raycore.attention.selection import TokenSelection
from raycore.attention.spec import Attention, AttentionSpec
from raycore.attention.torch_partial import TorchPartialAttention, max_blocks
from raycore.kernels import Backend
from raycore.kernels.gates import has_kernels
from raycore.layers.native_operations import NativeOperations
from raycore.layers.operations import Operations
from raycore.models.spec import Gate, ModelSpec
from raycore.parallel.context_parallel import ContextParallel
from raycore.sampling.kernels import SamplingKernels
from raycore.sampling.native import NativeSampling
from raycore.state.recurrence import Kernels, Recurrence, recurrence_of

_MakeAttention = Callable[[AttentionSpec, KVTensors], Attention]
"""Makes the attention of some layers."""


@dataclass(frozen=True, slots=True)
class ComputeBackend:
    """What computes a model on a worker's device."""

    operations_by: Backend
    """What computes everything but attention."""
    attention_by: Backend
    device: torch.device
    batch_invariant: bool
    cache_dtype: torch.dtype
    """Of the numbers in the KV cache."""

    @property
    def depends_on_threads(self) -> bool:
        """Whether attention's results may depend on the number of threads. `Operations` say it of their own."""
        return self.attention_by == "torch"

    def operations(self, *, has_many_rows: bool = False) -> Operations:
        """Return what makes the model's layers. `has_many_rows`: whether most steps have many tokens."""
        if self.operations_by == "native":
            return NativeOperations(batch_invariant=self.batch_invariant, shortens=not has_many_rows)
        if self.operations_by == "triton":
            # imports Triton, which only GPUs need
            from raycore.layers.gpu_operations import GpuOperations

            return GpuOperations(self.device, batch_invariant=self.batch_invariant)
        return Operations(self.device, batch_invariant=self.batch_invariant)

    def sampling(self) -> SamplingKernels:
        """Return what picks tokens."""
        if self.operations_by == "native":
            return NativeSampling()
        if self.operations_by == "triton":
            from raycore.sampling.gpu import GpuSampling

            return GpuSampling(self.device, batch_invariant=self.batch_invariant)
        return SamplingKernels(self.device, batch_invariant=self.batch_invariant)

    def parts_by_torch(self, spec: ModelSpec) -> list[str]:
        """Return the parts of a model that plain torch computes because the other kernels don't know them."""
        foreign = ["layers of transformers' code"] if spec.implementation == "transformers" else []
        gates: list[Gate] = [spec.gate, *chain.from_iterable(spec.layer_gates)]
        without_kernels = list(dict.fromkeys(gate for gate in gates if not has_kernels(gate)))
        by_torch = {
            "attention": self.attention_by == "torch",
            **{f"gates ({gate})": True for gate in without_kernels},
            "norms over all heads": spec.qk_norm == "width",
            "layer norms of heads": spec.qk_norm == "own_heads",
            "layer norms": self.operations_by == "triton" and spec.norm != "rms",
            "rotations before norms": spec.is_rotated_first,
            "scales of queries": spec.query_scale is not None,
            "layers that keep states": any(
                recurrence_of(kind, 1).backend(self.operations_by) == "torch"
                for kind in spec.mixer_kinds
                if kind.keeps_state
            ),
            # the kernel of experts routes, too
            "routers": self.operations_by == "triton" and spec.has_experts and bool(without_kernels),
        }
        by_torch |= {kind.by_torch: True for kind in spec.part_kinds if kind.by_torch}
        known = [] if self.operations_by == "torch" else [part for part, is_so in by_torch.items() if is_so]
        return foreign + known

    def kernels_of_states(self, recurrence: Recurrence) -> Kernels:
        """Return what computes layers that keep states."""
        return recurrence.kernels(recurrence.backend(self.operations_by), batch_invariant=self.batch_invariant)

    def attention(
        self,
        spec: AttentionSpec,
        kv: PagedCache,
        *,
        max_model_len: int,
        max_num_seqs: int,
        max_rows: int,
        groups: Sequence[Sequence[int]] | None = None,
        blocks_in_pages: Sequence[int] | None = None,
        context: ContextParallel | None = None,
    ) -> Attention:
        """Return attention to the cache `kv`.

        Args:
            max_model_len: maximum number of tokens of a sequence.
            max_num_seqs: maximum number of sequences in a step.
            max_rows: the largest number of decodes in a step, padding included.
            groups: the layers of each group of the cache. None: there is one group, with all layers.
            blocks_in_pages: by layer: see `LayerPlace`. None: always one.
            context: the workers that have other tokens' keys and values. None: this one has those of all tokens.
        """
        if isinstance(kv, LatentTensors):
            attention = self._latent_attention(spec, kv, max_rows, context)
        else:
            if context is None:
                make = self._plain_maker(kv, max_model_len, max_num_seqs, max_rows)
            else:
                make = self._divided_maker(kv, max_model_len, max_num_seqs, max_rows, context)
            in_pages = [1] * len(spec.windows) if blocks_in_pages is None else blocks_in_pages
            is_alike = set(in_pages) == {1} and not any(spec.chunks or [])
            if spec.heads.index is not None:
                attention = self._selected_blocks(make(spec, kv), spec, kv)
            elif (groups is None or len(groups) == 1) and is_alike:
                attention = make(spec, kv)
            else:
                tokens_per_block = kv.block_size * (1 if context is None else context.size)
                attention = _grouped(make, spec, kv, groups or [range(len(in_pages))], in_pages, tokens_per_block)
        return (
            PreparedAttention(attention, spec, batch_invariant=self.batch_invariant) if spec.is_prepared else attention
        )

    def _latent_attention(
        self, spec: AttentionSpec, kv: LatentTensors, max_rows: int, context: ContextParallel | None
    ) -> Attention:
        if context is not None:
            return self._divided_latent_attention(spec, kv, context)
        if spec.heads.index is not None:
            return self._selected_attention(spec, kv)
        if self.attention_by == "native":
            return NativeLatentAttention(spec, kv)
        if self.attention_by == "triton":
            from raycore.attention.paged_latent import TritonLatentAttention

            return TritonLatentAttention(spec, kv, max_rows, batch_invariant=self.batch_invariant)
        return TorchLatentAttention(spec, kv, batch_invariant=self.batch_invariant)

    def _selected_attention(self, spec: AttentionSpec, kv: LatentTensors) -> Attention:
        """Return attention to selected tokens."""
        invariant = self.batch_invariant
        if self.attention_by == "native":
            parts = NativeLatentAttention(spec, kv), NativeRowAttention(spec, kv)
        else:
            parts = (
                TorchLatentAttention(spec, kv, batch_invariant=invariant),
                TorchRowAttention(spec, kv, batch_invariant=invariant),
            )
        return SelectedAttention(spec.heads, TokenSelection(spec, kv, batch_invariant=invariant), *parts)

    def _selected_blocks(self, dense: Attention, spec: AttentionSpec, kv: KVTensors) -> Attention:
        """Return attention to selected blocks of tokens. `dense`: that to all tokens."""
        invariant = self.batch_invariant
        selection = BlockSelection(spec, kv, batch_invariant=invariant)
        return SelectedAttention(spec.heads, selection, dense, BlockRowAttention(spec, kv, batch_invariant=invariant))

    def _divided_latent_attention(self, spec: AttentionSpec, kv: LatentTensors, context: ContextParallel) -> Attention:
        """Return attention to a share of the latents, whose results workers put together."""
        share = ContextShare(context.rank, context.size, kv.block_size)
        part: PartialAttention
        if self.attention_by == "native":
            part = NativePartialLatentAttention(spec, kv, share)
        else:
            part = TorchPartialLatentAttention(spec, kv, share, batch_invariant=self.batch_invariant)
        return DividedAttention(part, context, spec.heads)

    def _plain_maker(self, kv: KVTensors, max_model_len: int, max_num_seqs: int, max_rows: int) -> _MakeAttention:
        if self.attention_by == "native":
            return NativeAttention
        if self.attention_by == "triton":
            from raycore.attention.paged import TritonAttention

            return partial(TritonAttention, max_rows=max_rows, batch_invariant=self.batch_invariant)
        attention = BatchInvariantAttention if self.batch_invariant else GatherAttention
        # all layers share it
        scratch = GatherScratch(kv, max_num_seqs, attention.max_blocks(max_model_len, kv.block_size))
        return partial(attention, scratch=scratch)

    def _divided_maker(
        self, kv: KVTensors, max_model_len: int, max_num_seqs: int, max_rows: int, context: ContextParallel
    ) -> _MakeAttention:
        """Return what makes attention to a share of the keys and values, whose results workers put together."""
        share = ContextShare(context.rank, context.size, kv.block_size)
        scratch: GatherScratch | None = None
        if self.attention_by == "torch":
            scratch = GatherScratch(kv, max_num_seqs, max_blocks(max_model_len, share))

        def make(spec: AttentionSpec, kv: KVTensors) -> DividedAttention:
            num_heads, invariant = spec.heads.num_heads * context.num_query_parts, self.batch_invariant
            part: PartialAttention
            if self.attention_by == "native":
                part = NativePartialAttention(spec, kv, share)
            elif scratch is not None:
                part = TorchPartialAttention(spec, kv, share, scratch, num_heads, batch_invariant=invariant)
            else:
                from raycore.attention.paged import TritonPartialAttention

                part = TritonPartialAttention(spec, kv, share, num_heads, max_rows, batch_invariant=invariant)
            return DividedAttention(part, context, spec.heads)

        return make


def _grouped(
    make: _MakeAttention,
    spec: AttentionSpec,
    kv: KVTensors,
    groups: Sequence[Sequence[int]],
    blocks_in_pages: Sequence[int],
    tokens_per_block: int,
) -> GroupedAttention:
    """Return attention of several groups of layers, each of which `make` makes."""
    places = dict[int, LayerPlace]()
    for group, of_group in enumerate(groups):
        chunks = [None] * len(spec.windows) if spec.chunks is None else spec.chunks
        alike: dict[tuple[int, int | None], list[int]] = {}
        for layer in of_group:
            alike.setdefault((blocks_in_pages[layer], chunks[layer]), []).append(layer)
        for (in_page, chunk), layers in alike.items():
            own = make(spec.of_layers(layers), kv.of_layers(layers))
            if chunk is not None:
                own = ChunkedAttention(own, chunk, tokens_per_block)
            places |= {layer: LayerPlace(own, index, group, in_page) for index, layer in enumerate(layers)}
    return GroupedAttention(places)
