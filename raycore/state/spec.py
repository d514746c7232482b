"""The interface between what knows the sequences of a step and what computes their states.

Each layer has the states of R rows. Every running request has rows of its own, and others keep states of prefixes.

Shape suffixes: n sequences, T tokens, S saves, N value heads, G key heads, K elements of a key head, H of a value head,
C channels of the convolution, W taps of the convolution, R rows, X inputs. What the gated delta rule calls queries and
keys, Mamba-2 calls C and B; groups are key heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from raycore.kernels.state_tables import StateTables

FROM_ZERO = -1
"""Instead of the row from which a sequence's state is read: the sequence begins."""


@dataclass(slots=True, frozen=True)
class StateStep:
    """The sequences of a step. The host knows all of this from the plan."""

    sequences_n4: NDArray[np.int32]
    """For each sequence: its first token among the T, its number of tokens, the row that its state is read from, or
    `FROM_ZERO`, and the row that the state after its last token is written to. Sequences with one token come first.
    Several sequences may read the same row, but no row that one writes is another's, for reading or for writing."""
    num_decodes: int
    """How many sequences at the beginning have one token."""
    saves_S3: NDArray[np.int32]
    """More rows that states are written to: the sequence's index, a number of its tokens, at least 1 and less than all,
    and the row that gets the state after so many of its tokens. Ordered by sequence, then by the number of tokens."""
    tables: StateTables | None = None
    """The same on the device, for kernels that run there. None: they copy it there themselves, once in a step. Graphs
    need tables that stay where they are."""


@dataclass(slots=True, frozen=True)
class DeltaShape:
    """One rank's sizes of a layer with the gated delta rule."""

    num_k_heads: int
    num_v_heads: int
    """A multiple of `num_k_heads`: value head i reads key head `i // (num_v_heads // num_k_heads)`."""
    k_dim: int
    v_dim: int
    conv_size: int
    """Number of taps of the convolution, the token's own included."""

    @property
    def num_channels(self) -> int:
        """Number of channels of the convolution: those of queries, then of keys, then of values."""
        return 2 * self.num_k_heads * self.k_dim + self.num_v_heads * self.v_dim


@dataclass(slots=True, frozen=True)
class DeltaLayer:
    """What a layer with the gated delta rule has beside its projections, and its states."""

    conv_CW: Tensor
    """The taps of each channel, the oldest first. In the model's data type."""
    decay_N: Tensor
    """float32: `A_log`."""
    bias_N: Tensor
    """float32: `dt_bias`."""
    conv_states_RCW: Tensor
    """[R, C, W - 1]: the last inputs of the convolution, the oldest first, before its activation."""
    states_RNKH: Tensor
    """float32[R, N, K, H]."""


class DeltaKernels(Protocol):
    """Computes the gated delta rule: in plain torch, by native kernels or by Triton's."""

    def __call__(self, layer: DeltaLayer, x_TX: Tensor, step: StateStep) -> Tensor:
        """Compute one layer, and write the states. Returns [T, N·H] in the data type of `x_TX`.

        x_TX has, for each token, the channels C of queries, keys and values, then `b`, N numbers, then `a`, N numbers.
        Channels go through the convolution and SiLU. Queries and keys are divided by their norms (eps 1e-6), and
        queries by sqrt(K). For each token, with a state S of [K, H] for each value head, which begins as zeros,

            S ← exp(-exp(decay) · softplus(a + bias)) · S
            S ← S + k ⊗ (sigmoid(b) · (v - Sᵀ k))
            output = Sᵀ q

        in float32. A sequence's result doesn't depend on the other sequences of the step.
        Source: Gated Delta Networks (https://arxiv.org/abs/2412.06464), equation 10.
        """
        ...


@dataclass(slots=True, frozen=True)
class Mamba2Shape:
    """One rank's sizes of a layer of Mamba-2."""

    num_groups: int
    num_heads: int
    """A multiple of `num_groups`: head i reads group `i // (num_heads // num_groups)`."""
    k_dim: int
    """Size of the state of each of a head's elements."""
    v_dim: int
    """Elements of a head."""
    conv_size: int
    """Number of taps of the convolution, the token's own included."""
    least_time: float = 0.0
    longest_time: float = math.inf
    """Times are limited to this range, after softplus."""

    @property
    def num_channels(self) -> int:
        """Number of channels of the convolution: those of x, then of B, then of C."""
        return self.num_heads * self.v_dim + 2 * self.num_groups * self.k_dim


@dataclass(slots=True, frozen=True)
class Mamba2Layer:
    """What a layer of Mamba-2 has beside its projections, and its states."""

    conv_CW: Tensor
    """The taps of each channel, the oldest first. In the model's data type."""
    conv_bias_C: Tensor | None
    """Is added to the convolution. In the model's data type."""
    decay_N: Tensor
    """float32: `A_log`."""
    bias_N: Tensor
    """float32: `dt_bias`."""
    skip_N: Tensor
    """float32: `D`."""
    conv_states_RCW: Tensor
    """[R, C, W - 1]: the last inputs of the convolution, the oldest first, before its activation."""
    states_RNKH: Tensor
    """float32[R, N, K, H]. Checkpoints and papers have them the other way round, as H by K."""


class Mamba2Kernels(Protocol):
    """Computes Mamba-2's recurrence: in plain torch, by native kernels or by Triton's."""

    def __call__(self, layer: Mamba2Layer, x_TX: Tensor, step: StateStep) -> Tensor:
        """Compute one layer, and write the states. Returns [T, N·H] in the data type of `x_TX`.

        x_TX has, for each token, the channels C of x, B and C, then the times dt of the N heads. Channels go through
        the convolution and SiLU. For each token, with a state S of [K, H] for each head, which begins as zeros,

            dt ← softplus(dt + bias), in the range of the times
            S ← exp(-exp(decay) · dt) · S + B ⊗ (dt · x)
            output = Sᵀ C + skip · x

        in float32. A sequence's result doesn't depend on the other sequences of the step.
        Source: Transformers are SSMs (https://arxiv.org/abs/2405.21060), section 7.
        """
        ...
