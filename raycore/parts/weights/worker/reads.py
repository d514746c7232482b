"""What a decode step reads of a worker's weights, and how fast a CPU's threads read them.

With few sequences, a decode step on a CPU waits for its weights. So bytes over time tell how near it is to the fastest
step that this memory allows.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch
from torch import Tensor

from raycore.decoder.network import Network
from raycore.layers.layer_inputs import LayerInputs
from raycore.models.spec import ModelSpec
from raycore.parts.weights.worker.in_place import weight_tensors

LEAST_BYTES = 64 << 20
"""Fewer bytes of weights may stay in caches, whose speed says nothing of the memory's."""
_MEASURED_S = 0.02
_LEAST_TENSOR = 1 << 20
_PASS_BYTES = 32 << 20
"""Of one timing: so many that the threads' start doesn't count."""


def bytes_of_step(network: Network, spec: ModelSpec) -> int:
    """Return how many bytes of weights a decode step reads. 0 if that depends on the step's tokens, or isn't known.

    Each weight of the layers and of the head is read once, in the form in which it lies in memory. The embedding counts
    only where the head is computed with it, and the table of layers' inputs, of which a token has a row, doesn't.
    """
    if spec.has_experts or spec.implementation == "transformers":
        return 0
    outside = network.weight_parts.outside_layers
    sizes, head, embedding = map(_sizes, (network, outside.get("head"), outside.get("embedding")))
    inputs = outside.get("layer_inputs")
    num_bytes = sum(sizes.values()) - (inputs.table_VO.nbytes if isinstance(inputs, LayerInputs) else 0)
    # a head in another form than the embedding is read instead of it
    return num_bytes - (sum(embedding.values()) if head.keys() - embedding.keys() else 0)


def read_rate(tensors: Iterable[Tensor]) -> float:
    """Return how many bytes of `tensors` torch's threads read in a second: the best of several times, in about 20 ms.

    0 if there is too little to read. The native kernels must be loaded.
    """
    started_s, best, num_bytes, seconds = time.perf_counter(), 0.0, 0, 0.0
    for each in tensors:
        if each.is_mkldnn or each.nbytes < _LEAST_TENSOR or not each.is_contiguous() or each.data_ptr() % 64:
            continue
        numbers = each.detach().flatten().view(torch.uint8)[: each.nbytes // 4 * 4].view(torch.float32)
        begun_s = time.perf_counter()
        torch.ops.raycore.read_floats(numbers)
        ended_s = time.perf_counter()
        num_bytes, seconds = num_bytes + numbers.nbytes, seconds + ended_s - begun_s
        if num_bytes >= _PASS_BYTES:
            best, num_bytes, seconds = max(best, num_bytes / seconds), 0, 0.0
            if ended_s - started_s > _MEASURED_S:
                break
    return best


def _sizes(network: object) -> dict[object, int]:
    """Return the bytes of a network's tensors, by what is the same for two views of the same numbers."""
    return {
        id(each) if each.is_mkldnn else (each.data_ptr(), each.numel()): each.numel() * each.itemsize
        for each in weight_tensors(network).values()
        if each.numel()
    }
