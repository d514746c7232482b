"""What methods of `worker_extension_cls` find in a worker under vLLM's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from raycore.config import EngineConfig
    from raycore.parts.weights.worker.update import NamedTensors


class ModelConfigView(NamedTuple):
    """Of the model."""

    model: str
    """The checkpoint's directory."""
    dtype: torch.dtype


class ModelView:
    """The model, whose weights can be replaced."""

    def __init__(self, worker: Any) -> None:
        """`worker`: its subclasses may have a `load_weights` of their own."""
        self._worker = worker

    def load_weights(self, weights: NamedTensors) -> set[str]:
        """See `WorkerWeightUpdates.load_weights`."""
        return self._worker.load_weights(weights)


class ModelRunnerView(NamedTuple):
    """What runs the model."""

    model: ModelView
    model_config: ModelConfigView
    vllm_config: EngineConfig
    device: torch.device
