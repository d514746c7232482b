"""Allocates one rank's experts, and has them filled from a checkpoint.

There are two formats of experts in checkpoints. In one, each expert has tensors of its own; transformers 4 writes this
format, and so does transformers 5 by default. In the other, all experts of a layer are stacked in one tensor, as
transformers 5 has them in memory. Shape suffixes: E the rank's experts, D hidden size, F the rank's rows of each expert
(2F where gate and up are fused).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from raycore.models.moe import ExpertShare, MoeSpec, has_stacked_experts
from raycore.weights.share import WeightShare
from raycore.weights.weight import Weight

Part = tuple[int | slice, ...]
"""The index that selects a part of a tensor."""


class Fill(Protocol):
    """Fills `out` with a part of the tensor `name`. The whole tensor must have `expected_shape`."""

    def __call__(self, out: Weight, name: str, expected_shape: tuple[int, ...], part: Part) -> None: ...


@dataclass
class SharedWeights:
    """The part of a sparse layer's shared experts on one tensor-parallel rank."""

    gate_up_FD: torch.Tensor
    """This rank's gate rows, then its up rows."""
    down_DF: torch.Tensor
    gate_1D: torch.Tensor | None
    """The weight of the gate of their result, which every rank has whole."""


@dataclass
class MoeWeights:
    """The router, the experts and the shared experts of one sparse layer on one rank."""

    router_ED: torch.Tensor
    """One row for each of the layer's experts, those of other ranks included."""
    first_expert: int
    """The index of the rank's first expert."""
    gate_up_EFD: torch.Tensor
    """For each of the rank's experts, its gate rows, then its up rows."""
    down_EDF: torch.Tensor
    correction_E: torch.Tensor | None = None
    """float32: see `Router.has_correction`."""
    shared: SharedWeights | None = None


class MoeLayout:
    """Allocates one rank's sparse layers and has `fill` fill them, possibly after `layer()` has returned."""

    def __init__(self, share: WeightShare, has_tensor: Callable[[str], bool], fill: Fill) -> None:
        assert share.spec.moe is not None
        assert share.held_experts is not None
        self._moe: MoeSpec = share.spec.moe
        self._share = share
        self._held: ExpertShare = share.held_experts
        self._hidden = share.spec.hidden_size
        self._fill = fill
        self._names = self._moe.names
        self._is_stacked = has_stacked_experts(self._moe, share.spec.names.layers, has_tensor)

    def layer(self, prefix: str) -> MoeWeights:
        """Allocate the weights of the layer whose tensors' names begin with `prefix`."""
        share, held, hidden = self._share, self._held, self._hidden
        block = prefix + ("mlp" if self._is_stacked else self._names.block)
        weights = MoeWeights(
            router_ED=self._router(block),
            first_expert=held.experts.start,
            gate_up_EFD=share.empty(len(held.experts), 2 * len(held.rows), hidden),
            down_EDF=share.empty(len(held.experts), hidden, len(held.rows)),
            correction_E=self._correction(block),
            shared=self._shared(block),
        )
        fill_expert = self._fill_stacked if self._is_stacked else self._fill_single
        for expert, gate_up_FD, down_DF in zip(held.experts, weights.gate_up_EFD, weights.down_EDF, strict=True):
            fill_expert(f"{block}.experts", expert, gate_up_FD, down_DF)
        return weights

    def _router(self, block: str) -> torch.Tensor:
        shape = self._moe.num_experts, self._hidden
        out_ED = self._share.empty(*shape, dtype=torch.float32 if self._moe.router.in_float32 else None)
        self._fill(out_ED, f"{block}.gate.weight", shape, (slice(None),))
        return out_ED

    def _correction(self, block: str) -> torch.Tensor | None:
        if not self._moe.router.has_correction:
            return None
        out_E = self._share.empty(self._moe.num_experts, dtype=torch.float32)
        self._fill(out_E, f"{block}.{self._names.correction}", (self._moe.num_experts,), (slice(None),))
        return out_E

    def _shared(self, block: str) -> SharedWeights | None:
        shared, rows, hidden = self._moe.shared, self._share.shared_expert_rows, self._hidden
        if shared is None:
            return None
        gate_1D = self._share.empty(1, hidden) if shared.has_gate else None
        if gate_1D is not None:
            self._fill(gate_1D, f"{block}.{self._names.shared_gate}.weight", (1, hidden), (slice(None),))
        out = SharedWeights(self._share.empty(2 * len(rows), hidden), self._share.empty(hidden, len(rows)), gate_1D)
        prefix = f"{block}.{self._names.shared}"
        self._fill_network(prefix, shared.intermediate_size, rows, out.gate_up_FD, out.down_DF)
        return out

    def _fill_single(self, prefix: str, expert: int, gate_up_FD: torch.Tensor, down_DF: torch.Tensor) -> None:
        self._fill_network(f"{prefix}.{expert}", self._moe.intermediate_size, self._held.rows, gate_up_FD, down_DF)

    def _fill_network(
        self, prefix: str, size: int, rows: range, gate_up_FD: torch.Tensor, down_DF: torch.Tensor
    ) -> None:
        """Fill the `rows` of a network of `size` rows, whose projections have tensors of their own."""
        part, hidden, names = _as_slice(rows), self._hidden, self._names
        gate_FD, up_FD = gate_up_FD.chunk(2)
        for name, out in ((names.gate, gate_FD), (names.up, up_FD)):
            self._fill(out, f"{prefix}.{name}.weight", (size, hidden), (part,))
        self._fill(down_DF, f"{prefix}.{names.down}.weight", (hidden, size), (slice(None), part))

    def _fill_stacked(self, prefix: str, expert: int, gate_up_FD: torch.Tensor, down_DF: torch.Tensor) -> None:
        moe, hidden = self._moe, self._hidden
        shape = (moe.num_experts, 2 * moe.intermediate_size, hidden)
        gate_FD, up_FD = gate_up_FD.chunk(2)
        for offset, out in ((0, gate_FD), (moe.intermediate_size, up_FD)):
            self._fill(out, f"{prefix}.gate_up_proj", shape, (expert, _as_slice(self._held.rows, offset)))
        shape = (moe.num_experts, hidden, moe.intermediate_size)
        self._fill(down_DF, f"{prefix}.down_proj", shape, (expert, slice(None), _as_slice(self._held.rows)))


def _as_slice(rows: range, offset: int = 0) -> slice:
    return slice(rows.start + offset, rows.stop + offset)
