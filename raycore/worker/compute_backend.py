"""Makes the operations and the attention of a model, by the backend that was chosen for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from raycore.attention.batch_invariant import BatchInvariantAttention
from raycore.attention.gather import GatherAttention
from raycore.attention.kv_tensors import KVTensors
from raycore.attention.native import NativeAttention
from raycore.attention.scratch import GatherScratch
from raycore.attention.spec import Attention, AttentionSpec
from raycore.layers.native_operations import NativeOperations
from raycore.layers.operations import Operations, TorchOperations
from raycore.sampling.kernels import SamplingKernels, TorchSampling
from raycore.sampling.native import NativeSampling
from raycore.worker.attention_backend import Backend


@dataclass(frozen=True, slots=True)
class ComputeBackend:
    """What computes a model on a worker's device."""

    name: Backend
    device: torch.device
    batch_invariant: bool
    cache_dtype: torch.dtype
    """Of the numbers in the KV cache."""

    def operations(self) -> Operations:
        """Return what makes the model's layers."""
        if self.name == "native":
            return NativeOperations(batch_invariant=self.batch_invariant)
        if self.name == "triton":
            # imports Triton, which only GPUs need
            from raycore.layers.gpu_operations import GpuOperations

            return GpuOperations(self.device, batch_invariant=self.batch_invariant)
        return TorchOperations(self.device, batch_invariant=self.batch_invariant)

    def sampling(self) -> SamplingKernels:
        """Return what picks tokens."""
        if self.name == "native":
            return NativeSampling()
        if self.name == "triton":
            from raycore.sampling.gpu import GpuSampling

            return GpuSampling(self.device, batch_invariant=self.batch_invariant)
        return TorchSampling(self.device, batch_invariant=self.batch_invariant)

    def attention(
        self, spec: AttentionSpec, kv: KVTensors, *, max_model_len: int, max_num_seqs: int, max_rows: int
    ) -> Attention:
        """Return attention to the cache `kv`.

        Args:
            max_model_len: maximum number of tokens of a sequence.
            max_num_seqs: maximum number of sequences in a step.
            max_rows: the largest number of decodes in a step, padding included.
        """
        if self.name == "native":
            return NativeAttention(spec, kv)
        if self.name == "triton":
            from raycore.attention.paged import TritonAttention

            return TritonAttention(spec, kv, max_rows, batch_invariant=self.batch_invariant)
        attention = BatchInvariantAttention if self.batch_invariant else GatherAttention
        max_blocks = attention.max_blocks(max_model_len, kv.block_size)
        return attention(spec, kv, GatherScratch(kv, max_num_seqs, max_blocks))
