"""Recordings of layers: all native operations of some layers are called at once, without Python between them.

With few rows, a small model's operations take microseconds, and Python needs as long to call each of them. What a layer
calls doesn't depend on the step, so it is recorded once. A recording keeps the tensors that it was made with. Weights
may change in place, or get other memory (see `replace_weights`), but stay the same objects.

A layer is only recorded if it does nothing but call native operations. Then its next results are compared with those of
its recording, bit by bit, before the recording is used alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from raycore.attention.native import NativeAttention
from raycore.attention.spec import Attention
from raycore.decoder.network import ComputeLayer, RunLayers
from raycore.kernels import library
from raycore.runner.execution import StepExecution

logger = logging.getLogger(__name__)

_MAX_ROWS = 64
"""With more rows, Python's part is small, and results of all operations would be kept until the layer's end."""
_NUM_CHECKS = 2
_LAYERS_TOGETHER = 4
"""So many layers are replayed by one call. Between calls, the number of threads may change."""


class RecordedLayers(StepExecution):
    """The recordings of a decoder's layers, with an attention backend of native kernels."""

    def __init__(self, attention: NativeAttention) -> None:
        self._attention = attention
        self._layers: dict[ComputeLayer, _RecordedLayer] = {}
        self._linked: dict[tuple[ComputeLayer, int], int] = {}
        """By the first of some layers and how many they are: its recording, which is linked with theirs."""
        self._replay = torch.ops.raycore.replay.default

    def of_step(self, num_rows: int, attention: Attention) -> RunLayers | None:
        """Return what computes layers in the step that has begun. None: layers compute it without recordings.

        `attention`: the step's attention, or what profiles it.
        """
        tensors = self._attention.step_tensors() if attention is self._attention and num_rows <= _MAX_ROWS else None
        if tensors is None:
            return None

        def run(
            layers: Sequence[ComputeLayer], h_TD: Tensor, attention: Attention, after_layer: Callable[[], None]
        ) -> Tensor:
            for first in range(0, len(layers), _LAYERS_TOGETHER):
                some = layers[first : first + _LAYERS_TOGETHER]
                linked = self._linked.get((some[0], len(some)))
                if linked is not None:
                    h_TD = self._replay(linked, len(some), h_TD, *tensors)
                    after_layer()
                    continue
                for layer in some:
                    h_TD = self._recorded(layer)(h_TD, attention, tensors)
                    after_layer()
                self._link(some)
            return h_TD

        return run

    def _recorded(self, layer: ComputeLayer) -> _RecordedLayer:
        recorded = self._layers.get(layer)
        if recorded is None:
            recorded = self._layers[layer] = _RecordedLayer(layer)
        return recorded

    def _link(self, layers: Sequence[ComputeLayer]) -> None:
        """Link the recordings of these layers, if all of them have been checked."""
        recorded = [self._layers[layer] for layer in layers]
        if all(each.is_checked for each in recorded):
            for each, following in pairwise(recorded):
                library.link_recordings(each.number, following.number)
            self._linked[layers[0], len(layers)] = recorded[0].number


class _RecordedLayer:
    def __init__(self, layer: ComputeLayer) -> None:
        self.number = 0
        """As `replay` takes it. 0: there is no recording."""
        self._layer = layer
        self._checks_left = _NUM_CHECKS
        self._can_be_recorded = True
        self._replay = torch.ops.raycore.replay.default

    @property
    def is_checked(self) -> bool:
        """Whether the recording is used alone."""
        return not self._checks_left

    def __call__(self, h_TD: Tensor, attention: Attention, tensors: tuple[Tensor, Tensor]) -> Tensor:
        if not self._checks_left:
            return self._replay(self.number, 1, h_TD, *tensors)
        if not self._can_be_recorded:
            return self._layer(h_TD, attention)
        if not self.number:
            return self._record(h_TD, attention, tensors)
        again_TD = h_TD.clone()
        out_TD = self._layer(h_TD, attention)
        if torch.equal(_bits(out_TD), _bits(self._replay(self.number, 1, again_TD, *tensors))):
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
            self.number = torch.ops.raycore.end_recording.default(out_TD)
            if not (has_succeeded and self.number):
                self._forget()
        return out_TD

    def _forget(self) -> None:
        """Let the layer be computed without a recording, which may hold the step's tensors."""
        self._can_be_recorded = False
        if self.number:
            library.delete_recording(self.number)
        self.number = 0

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
