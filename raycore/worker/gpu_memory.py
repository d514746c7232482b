"""What a GPU's memory is used for."""

from __future__ import annotations

from typing import NamedTuple

_MOST_CUDA_BYTES = 1 << 30
"""What CUDA itself takes for a process is at most this much: an H100 takes 0.5 to 0.8 GiB."""


class MemoryUse(NamedTuple):
    """What takes a GPU's memory before the KV cache is allocated. All sizes are in bytes."""

    total: int
    utilization: float
    """`gpu_memory_utilization`: the fraction of the GPU's memory that this worker may use."""
    free: int
    """What no process uses, with this worker's weights on the GPU."""
    weights: int
    adapters: int
    """Set aside for LoRA adapters."""
    step: int
    """What the largest step needs at its peak, and working memory that is allocated once."""
    graphs: int
    """Set aside for CUDA graphs."""
    states: int = 0
    """Those of layers that keep states."""
    images: int = 0
    """Set aside for encoding images, and for their embeddings."""

    @property
    def left(self) -> int:
        """What is left for the KV cache. Negative if there is too little memory.

        This worker's fraction is its own: other processes on the GPU only count if they leave less of it free.
        """
        return min(self._left_of_own, self._left_of_free)

    @property
    def _cuda(self) -> int:
        """What CUDA itself takes. How much of what is used belongs to other processes can't be asked."""
        return min(self.total - self.free - self.weights, _MOST_CUDA_BYTES)

    @property
    def _left_of_own(self) -> int:
        return int(self.total * self.utilization) - self.weights - self._cuda - self._needed

    @property
    def _left_of_free(self) -> int:
        return self.free - self._needed

    @property
    def _needed(self) -> int:
        """What is still to be allocated, beside the KV cache."""
        return self.adapters + self.states + self.step + self.images + self.graphs

    def table(self) -> str:
        """Return the sizes as text, one line each, with what can be done about them."""
        usable = int(self.total * self.utilization)
        lines = [
            (usable, f"gpu_memory_utilization={self.utilization:g} of {self.total / 2**30:.2f} GiB"),
            (-self.weights, "weights: use more workers (tensor_parallel_size, pipeline_parallel_size)"),
            (-self.adapters, "LoRA adapters: lower max_loras or max_lora_rank"),
            (-self.states, "states: lower max_num_seqs or num_prefix_states"),
            (-self.step, "the largest step: lower max_num_batched_tokens or max_num_seqs"),
            (-self.images, "images: lower max_num_batched_tokens, or max_pixels in mm_processor_kwargs"),
            (-self.graphs, "CUDA graphs: enforce_eager=True needs none"),
            (-self._cuda, "CUDA itself"),
            (self.left - self._left_of_own, "taken by other processes: end those that you don't need"),
            (self.left, "left"),
        ]
        return "\n".join(f"{size / 2**30:9.2f} GiB  {what}" for size, what in lines if size or what == "left")
