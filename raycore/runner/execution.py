"""How the layers of a step are run: operation by operation, or as CUDA graphs. See `recorded_layers`, too."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from raycore.attention.spec import Attention
from raycore.decoder.network import RunLayers
from raycore.parts.adapters.layers import AdapterRows
from raycore.runner.decode_graphs import DecodeGraphs
from raycore.step.device_batch import StepTensors


class StepExecution:
    """Runs all operations one by one, as layers call them."""

    def run(self, compute: Callable[[], Tensor], tensors: StepTensors) -> Tensor:
        """Return what `compute` returns, which runs the layers of the step that has begun."""
        return compute()

    def of_step(self, num_rows: int, attention: Attention) -> RunLayers | None:
        """Return what computes layers in the step that has begun. None: they do it themselves.

        `attention`: the step's attention, or what profiles it.
        """
        return None

    def unpadded(self) -> StepExecution:
        """Return how layers are run from now on, when no step is padded."""
        return self


BY_OPERATION = StepExecution()


class GraphedSteps(StepExecution):
    """Runs padded steps of decodes as graphs, unless adapters change some rows."""

    def __init__(self, graphs: DecodeGraphs, adapter_rows: AdapterRows | None = None) -> None:
        self._graphs = graphs
        self._adapter_rows = adapter_rows

    def run(self, compute: Callable[[], Tensor], tensors: StepTensors) -> Tensor:
        if not tensors.is_padded or not (self._adapter_rows is None or self._adapter_rows.is_empty):
            return compute()
        return self._graphs.run(len(tensors.slots_T), compute)[: len(tensors.next_indices_R)]

    def unpadded(self) -> StepExecution:
        """No graph is used again, so their memory is freed."""
        return BY_OPERATION
