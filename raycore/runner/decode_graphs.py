"""CUDA graphs of steps that only decode: the GPU gets all of a step's kernels at once.

Launching a kernel takes the host some 5 µs, and a small model's decode step has hundreds of kernels that take the GPU
less than that. A graph is captured once and then launched as a whole. It always has the same number of rows, so steps
are padded to a few sizes (see `DeviceBatch`). A graph reads its inputs where they were when it was captured.
"""

from __future__ import annotations

# torch's CUDA graphs are partially typed:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
import logging
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

Compute = Callable[[], Tensor]


class Capture(Protocol):
    """Records the kernels that a function launches."""

    def __call__(self, compute: Compute) -> Compute:
        """Return a function that launches them again. It returns the same tensor every time, with new values."""
        ...


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Return the numbers of rows for which graphs are captured, ascending. The last one is at least `max_num_seqs`.

    Up to 8 rows they are powers of two, and then an eighth more each time, so that little is computed for padding.
    """
    sizes = [1, 2, 4, 8]
    while sizes[-1] < max_num_seqs:
        step = 1 << max(3, sizes[-1].bit_length() - 3)
        sizes.append((sizes[-1] // step + 1) * step)
    return [size for size, before in zip(sizes, [0, *sizes], strict=False) if before < max_num_seqs]


class DecodeGraphs:
    """A graph for each number of rows, captured when steps of this size come for the second time.

    So an engine serves at once, and captures only sizes that it needs. Until then, and if capturing fails, steps are
    computed without a graph.
    """

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._was_seen: set[int] = set()
        self._graphs: dict[int, Compute] = {}
        self._is_broken = False

    def run(self, num_rows: int, compute: Compute) -> Tensor:
        """Return what `compute` returns. For the same `num_rows`, it must always read the same tensors.

        The result is valid until the next call: graphs share memory.
        """
        graph = self._graphs.get(num_rows)
        if graph is None and num_rows in self._was_seen and not self._is_broken:
            graph = self._try_to_capture(num_rows, compute)
        self._was_seen.add(num_rows)
        return compute() if graph is None else graph()

    def _try_to_capture(self, num_rows: int, compute: Compute) -> Compute | None:
        try:
            graph = self._graphs[num_rows] = self._capture(compute)
        except RuntimeError as error:
            self._is_broken = True
            logger.warning(
                "no CUDA graphs, so decoding is slower: capturing one for %d rows failed: %s", num_rows, error
            )
            return None
        return graph


class CudaCapture:
    """Captures CUDA graphs, which share one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Compute) -> Compute:
        graph = torch.cuda.CUDAGraph()
        # other threads may use the device meanwhile: the standard mode would let their calls break the capture
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = compute()

        def launch() -> Tensor:
            graph.replay()
            return result

        return launch
