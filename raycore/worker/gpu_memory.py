"""What a GPU's memory is used for."""

from __future__ import annotations

from typing import NamedTuple


class MemoryUse(NamedTuple):
    """What takes a GPU's memory before the KV cache is allocated. All sizes are in bytes."""

    total: int
    share: float
    """`gpu_memory_utilization`: the fraction of the GPU's memory that the engine may use."""
    weights: int
    step: int
    """What the largest step needs at its peak, and working memory that is allocated once."""
    graphs: int
    """Set aside for CUDA graphs."""
    others: int
    """Taken by CUDA itself, and by other processes."""

    @property
    def left(self) -> int:
        """What is left for the KV cache. Negative if there is too little memory."""
        return int(self.total * self.share) - self.weights - self.step - self.graphs - self.others

    def table(self) -> str:
        """Return the sizes as text, one line each, with what can be done about them."""
        lines = [
            (int(self.total * self.share), f"gpu_memory_utilization={self.share:g} of {self.total / 2**30:.2f} GiB"),
            (-self.weights, "weights: use more workers (tensor_parallel_size, pipeline_parallel_size)"),
            (-self.step, "the largest step: lower max_num_batched_tokens or max_num_seqs"),
            (-self.graphs, "CUDA graphs: enforce_eager=True needs none"),
            (-self.others, "CUDA itself and other processes: end those that you don't need"),
            (self.left, "left"),
        ]
        return "\n".join(f"{size / 2**30:9.2f} GiB  {what}" for size, what in lines if size or what == "left")
