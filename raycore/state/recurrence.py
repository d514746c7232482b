"""The contract of what computes the states of one kind of layers, and the memory that this needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor

from raycore.class_paths import import_path
from raycore.kernels import Backend
from raycore.models.mixers.spec import MixerSpec
from raycore.models.mixers.state import MatrixMixer
from raycore.state.spec import StateStep
from raycore.state.torch_recurrence import CHUNK
from raycore.step.memory import FLOAT32_BYTES, INT64_BYTES, MixerMemory, StepLimits

_MAX_NATIVE_K_DIM = 256
_NATIVE_CONV_SIZES = range(2, 5)
"""What native kernels of matrices can compute."""

Kernels = Callable[[Any, Tensor, StateStep], Tensor]
"""Compute a layer, and write the states. They get a `Recurrence.layer`, what the mixer hands over, and the step."""


class Recurrence(ABC):
    """Computes the states of one kind of layers on one rank. `StateMixer.recurrence` names the class."""

    layer: ClassVar[Callable[..., Any]]
    """Makes what the kernels know of a layer: of `MixerConstants.of_state`, and of the tensors of `MixerSpec.state`."""
    by_torch: ClassVar[Callable[..., Kernels]]
    """Makes the kernels in plain torch, of `StateMixer.of_rank` and `batch_invariant`."""
    others: ClassVar[Mapping[Backend, str]] = {}
    """What makes other kernels, of `StateMixer.of_rank`: `package.module.Class`. They are paths, because only GPUs need
    Triton. They are always batch-invariant."""

    def __init__(self, mixer: Any, tp_size: int) -> None:
        """`mixer`: the spec of the layers, which one of `tp_size` ranks computes."""
        self._own = mixer.of_rank(tp_size)

    def backend(self, wanted: Backend) -> Backend:
        """Return whose kernels compute layers of these sizes, where `wanted` computes what isn't such a layer."""
        return wanted if wanted in self.others else "torch"

    def kernels(self, by: Backend, *, batch_invariant: bool) -> Kernels:
        """Return what computes a layer.

        `batch_invariant`: make the bits of each token's result independent of the step's other sequences, and of how
        its prompt is divided into steps.
        """
        if by in self.others:
            return import_path(self.others[by])(self._own)
        return self.by_torch(self._own, batch_invariant=batch_invariant)

    @abstractmethod
    def step_bytes(self, limits: StepLimits, hidden_size: int, item_size: int, *, is_native: bool) -> int:
        """Return an upper bound on what a step needs within a layer, hidden states included.

        Args:
            item_size: bytes of a number of the model's data type.
            is_native: whether native kernels compute it.
        """


def recurrence_of(mixer: MixerSpec, tp_size: int) -> Recurrence:
    """Return what computes layers that keep a state on one of `tp_size` ranks."""
    return import_path(mixer.recurrence)(mixer, tp_size)


class MatrixRecurrence(Recurrence):
    """Computes layers with the states of a `MatrixMixer`."""

    _own: MatrixMixer

    def backend(self, wanted: Backend) -> Backend:
        fits = self._own.k_dim <= _MAX_NATIVE_K_DIM and self._own.conv_size in _NATIVE_CONV_SIZES
        return super().backend(wanted) if wanted != "native" or fits else "torch"

    def step_bytes(self, limits: StepLimits, hidden_size: int, item_size: int, *, is_native: bool) -> int:
        own, num_seqs = self._own, min(limits.num_seqs, limits.num_tokens)
        if is_native:
            in_dtype = 3 * hidden_size + own.num_channels + 2 * own.num_v_heads + 3 * own.num_values
            return limits.num_tokens * (in_dtype * item_size + own.num_channels * FLOAT32_BYTES)
        channels, keys, values = own.num_channels, own.num_v_heads * own.k_dim, own.num_values
        in_dtype = 3 * hidden_size + 2 * channels + 2 * own.num_v_heads + 3 * values
        in_float32 = 2 * channels + 3 * keys + 2 * values + 6 * own.num_v_heads
        of_token = in_dtype * item_size + in_float32 * FLOAT32_BYTES + own.conv_size * INT64_BYTES
        # a copy of each decode's state, and what chunks of a prompt's tokens are to each other
        state = keys * own.v_dim * FLOAT32_BYTES
        decodes = num_seqs * (state + 3 * channels * own.conv_size * item_size)
        chunk = own.num_v_heads * CHUNK * (6 * CHUNK + 4 * (own.k_dim + own.v_dim)) * FLOAT32_BYTES
        return limits.num_tokens * of_token + max(decodes, chunk + state)


class StateMemory(MixerMemory):
    """That of layers that keep a state."""

    def exchanged_bytes(self) -> int:
        """Return no more than a layer's: those of the rows that other workers have projected, if they divide rows."""
        has_copies = self.limits.context_size > self.limits.num_query_parts
        return self.layer_bytes(is_native=False) if has_copies else 0

    def layer_bytes(self, *, is_native: bool) -> int:
        recurrence, item_size = recurrence_of(self.mixer, self.tp_size), self.dtype.itemsize
        is_native = is_native and recurrence.backend("native") == "native"
        return recurrence.step_bytes(self.limits, self.spec.hidden_size, item_size, is_native=is_native)
