"""Attention of workers that each have the keys and values of some of a sequence's tokens (context parallelism).

Each worker normalizes and rotates its own queries, and stores the keys and values that are its share. Then the workers
exchange queries, so that each of them computes all queries' attention to its own keys, and exchange the results, which
are *parts* of attention to all keys. A worker puts its own heads' parts together, in float32, in the order of the
workers. So the bits depend on nothing but the parts.

Shape suffixes: T tokens, P parts, O fused query, key and value rows, X anything.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from raycore.attention.spec import Attention
from raycore.models.mixers.spec import HeadShape
from raycore.step.batch import StepInputs
from raycore.step.device_batch import StepTensors


class PartialAttention(Protocol):
    """Attention to those keys and values that one worker has."""

    def begin(self, step: StepInputs, tensors: StepTensors) -> None:
        """Prepare for the layers of `step`, whose inputs on the device are `tensors`."""
        ...

    def store(self, layer: int, qkv_TO: Tensor) -> None:
        """Normalize, if the model does, and rotate queries and keys in place, and store the worker's share of keys and
        values."""
        ...

    def attend(self, layer: int, q_TX: Tensor) -> Tensor:
        """Return parts, [T, X], in float32: the queries' attention to the worker's keys, and by what it was divided.

        The queries may be of several workers, one worker's heads after the other's, and so are the parts. A query may
        see none of the worker's keys.
        """
        ...

    def merge(self, layer: int, parts_PTX: Tensor) -> Tensor:
        """Return attention to all keys, [T, query heads · H] in the model's dtype, of all workers' parts for this
        worker's heads. Sinks are added here."""
        ...


class ContextGroup(Protocol):
    """The workers that have the keys and values of the same heads."""

    def gather_queries(self, q_TX: Tensor) -> Tensor:
        """Return the queries of those workers that have other query heads side by side, [T, X]."""
        ...

    def exchange_parts(self, x_TX: Tensor) -> Tensor:
        """Return what each worker of the group has computed for this worker's heads, [P, T, X]."""
        ...


class RowGroup(Protocol):
    """The workers that divide a step's rows."""

    def own(self, x_TX: Tensor) -> Tensor:
        """Return this worker's rows of all."""
        ...

    def gather(self, own_TX: Tensor) -> Tensor:
        """Return the rows of all workers, in the order of the step."""
        ...


class DividedAttention:
    """Computes the attention of one step at a time: call `begin`, then the object itself for every layer."""

    def __init__(self, partial: PartialAttention, group: ContextGroup, heads: HeadShape) -> None:
        """`heads`: of this worker."""
        self._partial = partial
        self._group = group
        self._query_width = heads.num_heads * heads.head_dim

    def begin(self, step: StepInputs, tensors: StepTensors) -> None:
        """Prepare for the layers of `step`, whose inputs on the device are `tensors`."""
        self._partial.begin(step, tensors)

    def __call__(self, layer: int, qkv_TO: Tensor) -> Tensor:
        """Compute attention in one layer. Returns [T, query heads · H]."""
        self._partial.store(layer, qkv_TO)
        q_TX = self._group.gather_queries(qkv_TO[:, : self._query_width])
        return self._partial.merge(layer, self._group.exchange_parts(self._partial.attend(layer, q_TX)))


class GatheredRowsAttention:
    """Gathers the rows that workers divide among themselves, and lets another attention, or what keeps states, compute
    all of them."""

    def __init__(self, attention: Attention, rows: RowGroup) -> None:
        self._attention = attention
        self._rows = rows

    def begin(self, step: StepInputs, tensors: StepTensors) -> None:
        """Prepare for the layers of `step`, whose inputs on the device are `tensors`."""
        self._attention.begin(step, tensors)

    def __call__(self, layer: int, qkv_TO: Tensor) -> Tensor:
        """Compute attention in one layer, of this worker's rows and for them."""
        return self._rows.own(self._attention(layer, self._rows.gather(qkv_TO)))
