"""Recordings of layers: all of a layer's native operations are called at once, without Python between them.

With few rows, a small model's operations take microseconds, and Python needs as long to call each of them. What a layer
calls doesn't depend on the step, so it is recorded once. A recording keeps the tensors that it was made with. Weights
may change in place, or get other memory (see `replace_weights`), but stay the same objects.

A layer is only recorded if it does nothing but call native operations. Then its next results are compared with those of
its recording, bit by bit, before the recording is used alone.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from raycore.attention.native import NativeAttention
from raycore.attention.spec import Attention
from raycore.decoder.network import ComputeLayer, RunLayer
from raycore.kernels import library
from raycore.runner.execution import StepExecution

logger = logging.getLogger(__name__)

_MAX_ROWS = 64
"""With more rows, Python's part is small, and results of all operations would be kept until the layer's end."""
_NUM_CHECKS = 2


class RecordedLayers(StepExecution):
    """The recordings of a decoder's layers, with an attention backend of native kernels."""

    def __init__(self, attention: NativeAttention) -> None:
        self._attention = attention
        self._layers: dict[ComputeLayer, _RecordedLayer] = {}

    def of_step(self, num_rows: int, attention: Attention) -> RunLayer | None:
        """Return what computes layers in the step that has begun. None: layers compute it without recordings.

        `attention`: the step's attention, or what profiles it.
        """
        tensors = self._attention.step_tensors() if attention is self._attention and num_rows <= _MAX_ROWS else None
        if tensors is None:
            return None

        def run(layer: ComputeLayer, h_TD: Tensor, attention: Attention) -> Tensor:
            recorded = self._layers.get(layer)
            if recorded is None:
                recorded = self._layers[layer] = _RecordedLayer(layer)
            return recorded(h_TD, attention, tensors)

        return run


class _RecordedLayer:
    def __init__(self, layer: ComputeLayer) -> None:
        self._layer = layer
        self._number = 0
        self._checks_left = _NUM_CHECKS
        self._can_be_recorded = True
        self._replay = torch.ops.raycore.replay.default

    def __call__(self, h_TD: Tensor, attention: Attention, tensors: tuple[Tensor, Tensor]) -> Tensor:
        if not self._checks_left:
            return self._replay(self._number, h_TD, *tensors)
        if not self._can_be_recorded:
            return self._layer(h_TD, attention)
        if not self._number:
            return self._record(h_TD, attention, tensors)
        again_TD = h_TD.clone()
        out_TD = self._layer(h_TD, attention)
        if torch.equal(_bits(out_TD), _bits(self._replay(self._number, again_TD, *tensors))):
            self._checks_left -= 1
        else:
            logger.error("a layer's recording gives other results than the layer, so it isn't used: please report it")
            self._forget()
        return out_TD

    def _record(self, h_TD: Tensor, attention: Attention, tensors: tuple[Tensor, Tensor]) -> Tensor:
        calls = _Calls()
        has_succeeded = False
        torch.ops.raycore.begin_recording.default(h_TD, *tensors)
        out_TD = h_TD
        try:
            with calls:
                out_TD = self._layer(h_TD, attention)
            has_succeeded = calls.are_native
        finally:
            self._number = torch.ops.raycore.end_recording.default(out_TD)
            if not (has_succeeded and self._number):
                self._forget()
        return out_TD

    def _forget(self) -> None:
        """Let the layer be computed without a recording, which may hold the step's tensors."""
        self._can_be_recorded = False
        if self._number:
            library.delete_recording(self._number)
        self._number = 0

    def __del__(self) -> None:
        self._forget()


class _Calls(TorchDispatchMode):
    """Notices whether operations other than the native ones are called."""

    are_native = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would import its compiler, which takes a second, to say that this isn't to be compiled."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.are_native = self.are_native and func.namespace == "raycore"
        return func(*args, **(kwargs or {}))


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8)
