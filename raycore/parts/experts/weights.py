"""Allocates one rank's experts, and has them filled from a checkpoint.

There are two formats of experts in checkpoints. In one, each expert has tensors of its own; transformers 4 writes this
format, and so does transformers 5 by default. In the other, all experts of a layer are stacked in one tensor, as
transformers 5 has them in memory: see `MoeSpec.is_interleaved`. Shape suffixes: E the rank's experts, D hidden size, F
the rank's rows of each expert (2F where gate and up are fused).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from raycore.parts.experts.models import (
    MXFP4_NUMBERS,
    ExpertNames,
    ExpertShare,
    MoeSpec,
    has_mxfp4_experts,
    has_stacked_experts,
)
from raycore.weights.fp8_weight import Fp8Weight
from raycore.weights.integer_parts import IntegerParts
from raycore.weights.integer_weight import IntegerWeight, kept_group_size
from raycore.weights.share import WeightShare
from raycore.weights.weight import Weight

Part = tuple[int | slice, ...]
"""The index that selects a part of a tensor."""


class Fill(Protocol):
    """Fills `out` with a part of the tensor `name`. The whole tensor must have `expected_shape`."""

    def __call__(self, out: Weight, name: str, expected_shape: tuple[int, ...], part: Part) -> None: ...


@dataclass
class SharedExpertWeights:
    """The part of a sparse layer's shared experts on one tensor-parallel rank."""

    gate_up_FD: torch.Tensor
    """This rank's gate rows, then its up rows."""
    down_DF: torch.Tensor
    gate_1D: torch.Tensor | None
    """The weight of the gate of their result, which every rank has whole."""


class ExpertWeights(NamedTuple):
    """The weights of one expert, or of a rank's rows of it. Or, with one dimension more, those of several experts."""

    gate_up_FD: Weight
    """The rows of the gate, then those of up."""
    down_DF: Weight
    gate_up_bias_F: torch.Tensor | None = None
    down_bias_D: torch.Tensor | None = None

    def map_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> ExpertWeights:
        """Return `change` of each tensor."""
        biases = (None if each is None else change(each) for each in self[2:])
        return ExpertWeights(_changed(self.gate_up_FD, change), _changed(self.down_DF, change), *biases)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those that there are. The weights may not be quantized."""
        assert isinstance(self.gate_up_FD, torch.Tensor), "ranks that exchange experts have converted them"
        assert isinstance(self.down_DF, torch.Tensor), "ranks that exchange experts have converted them"
        biases = self.gate_up_bias_F, self.down_bias_D
        return [self.gate_up_FD, self.down_DF, *(bias for bias in biases if bias is not None)]


@dataclass
class MoeWeights:
    """The router, the experts and the shared experts of one sparse layer on one rank."""

    router_ED: torch.Tensor
    """One row for each of the layer's experts, those of other ranks included."""
    first_expert: int
    """The index of the rank's first expert."""
    gate_up_EFD: Weight
    """For each of the rank's experts, its gate rows, then its up rows."""
    down_EDF: Weight
    correction_E: torch.Tensor | None = None
    """float32: see `ExpertChoice.has_correction`."""
    shared: SharedExpertWeights | None = None
    router_bias_E: torch.Tensor | None = None
    gate_up_bias_EF: torch.Tensor | None = None
    down_bias_ED: torch.Tensor | None = None
    """None on ranks that don't have the first row of each expert, because the sum over ranks must include it once."""

    @property
    def stacked(self) -> ExpertWeights:
        """The weights of the rank's experts."""
        return ExpertWeights(self.gate_up_EFD, self.down_EDF, self.gate_up_bias_EF, self.down_bias_ED)

    def expert(self, index: int) -> ExpertWeights:
        """Return the weights of one of the rank's experts. They share the memory of all."""
        return self.stacked.map_tensors(lambda each: each[index])


class MoeLayout:
    """Allocates one rank's sparse layers and has `fill` fill them, possibly after `layer()` has returned."""

    def __init__(self, share: WeightShare, has_tensor: Callable[[str], bool], fill: Fill) -> None:
        assert share.spec.moe is not None
        assert share.local_experts is not None
        self._moe: MoeSpec = share.spec.moe
        self._share = share
        self._local: ExpertShare = share.local_experts
        self._hidden = share.spec.hidden_size
        self._fill = fill
        self._names = self._moe.names
        self._is_stacked = has_stacked_experts(self._moe, share.spec.names.layers, has_tensor)
        self._has_tensor = has_tensor
        # what config.json has as quantized isn't if there are ordinary tensors
        is_plain = self._is_stacked and not has_mxfp4_experts(self._moe, share.spec.names.layers, has_tensor)
        self._kept = None if is_plain else share.kept_experts

    def layer(self, prefix: str) -> MoeWeights:
        """Allocate the weights of the layer whose tensors' names begin with `prefix`."""
        share, local, hidden = self._share, self._local, self._hidden
        has_bias, is_first = self._moe.has_bias, local.rows.start == 0
        block = prefix + ("mlp" if self._is_stacked else self._names.block)
        weights = MoeWeights(
            router_ED=self._router(block),
            first_expert=local.experts.start,
            gate_up_EFD=self._empty_experts(2 * len(local.rows), hidden),
            down_EDF=self._empty_experts(hidden, len(local.rows), local.rows.start),
            correction_E=self._correction(block),
            shared=self._shared(block),
            router_bias_E=self._router_bias(block),
            gate_up_bias_EF=share.empty(len(local.experts), 2 * len(local.rows)) if has_bias else None,
            down_bias_ED=share.empty(len(local.experts), hidden) if has_bias and is_first else None,
        )
        fill_expert = self._fill_stacked if self._is_stacked else self._fill_single
        for index, expert in enumerate(local.experts):
            fill_expert(f"{block}.experts", expert, weights.expert(index))
        return weights

    def _router(self, block: str) -> torch.Tensor:
        shape = self._moe.num_experts, self._hidden
        out_ED = self._share.empty(*shape, dtype=torch.float32 if self._moe.router.in_float32 else None)
        self._fill(out_ED, f"{block}.{self._names.router}.weight", shape, (slice(None),))
        return out_ED

    def _router_bias(self, block: str) -> torch.Tensor | None:
        router, num = self._moe.router, self._moe.num_experts
        if not router.has_bias:
            return None
        out_E = self._share.empty(num, dtype=torch.float32 if router.in_float32 else None)
        self._fill(out_E, f"{block}.{self._names.router}.bias", (num,), (slice(None),))
        return out_E

    def _correction(self, block: str) -> torch.Tensor | None:
        if not self._moe.router.has_correction:
            return None
        out_E = self._share.empty(self._moe.num_experts, dtype=torch.float32)
        self._fill(out_E, f"{block}.{self._names.correction}", (self._moe.num_experts,), (slice(None),))
        return out_E

    def _shared(self, block: str) -> SharedExpertWeights | None:
        shared, rows, hidden = self._moe.shared, self._share.shared_expert_rows, self._hidden
        if shared is None:
            return None
        gate_1D = self._share.empty(1, hidden) if shared.has_gate else None
        if gate_1D is not None:
            self._fill(gate_1D, f"{block}.{self._names.shared_gate}.weight", (1, hidden), (slice(None),))
        out = SharedExpertWeights(
            self._share.empty(2 * len(rows), hidden), self._share.empty(hidden, len(rows)), gate_1D
        )
        prefix = f"{block}.{self._names.shared}"
        own = ExpertWeights(out.gate_up_FD, out.down_DF)
        # whatever the projections of experts are called
        self._fill_network(prefix, ExpertNames(), shared.intermediate_size, rows, own)
        return out

    def _empty_experts(self, num_rows: int, num_columns: int, first_column: int = 0) -> Weight:
        """Allocate one projection of all of the rank's experts. `first_column`: where the rank's part begins."""
        share, num, scheme = self._share, len(self._local.experts), self._kept
        group_size = None if scheme is None else kept_group_size(scheme, num_columns, first_column)
        if scheme is None or group_size is None:
            return share.empty(num, num_rows, num_columns)
        size = num * num_rows, num_columns, scheme.bits, group_size
        stacked = IntegerWeight.empty(*size, scheme.row_bits, share.device, scheme.code)
        return stacked.map_tensors(lambda each: each.view(num, num_rows, each.shape[1]))

    def _fill_single(self, prefix: str, expert: int, out: ExpertWeights) -> None:
        self._fill_network(f"{prefix}.{expert}", self._names, self._moe.intermediate_size, self._local.rows, out)

    def _fill_network(self, prefix: str, names: ExpertNames, size: int, rows: range, out: ExpertWeights) -> None:
        """Fill the `rows` of a network of `size` rows, whose projections have tensors of their own."""
        part, hidden = _as_slice(rows), self._hidden
        for name, out_FD in zip((names.gate, names.up), _halves(out.gate_up_FD), strict=True):
            self._fill(out_FD, f"{prefix}.{name}.weight", (size, hidden), (part,))
        self._fill(out.down_DF, f"{prefix}.{names.down}.weight", (hidden, size), (slice(None), part))
        if out.gate_up_bias_F is not None:
            for name, out_F in zip((names.gate, names.up), out.gate_up_bias_F.chunk(2), strict=True):
                self._fill(out_F, f"{prefix}.{name}.bias", (size,), (part,))
        if out.down_bias_D is not None:
            self._fill(out.down_bias_D, f"{prefix}.{names.down}.bias", (hidden,), (slice(None),))

    def _fill_stacked(self, prefix: str, expert: int, out: ExpertWeights) -> None:
        num, size, hidden = self._moe.num_experts, self._moe.intermediate_size, self._hidden
        for rows_of_half, out_FD in zip(self._stacked_halves(), _halves(out.gate_up_FD), strict=True):
            self._fill_matrix(out_FD, f"{prefix}.gate_up_proj", (2 * size, hidden), expert, rows_of_half, slice(None))
        own = _as_slice(self._local.rows)
        self._fill_matrix(out.down_DF, f"{prefix}.down_proj", (hidden, size), expert, slice(None), own)
        if out.gate_up_bias_F is not None:
            for rows_of_half, out_F in zip(self._stacked_halves(), out.gate_up_bias_F.chunk(2), strict=True):
                self._fill(out_F, f"{prefix}.gate_up_proj_bias", (num, 2 * size), (expert, rows_of_half))
        if out.down_bias_D is not None:
            self._fill(out.down_bias_D, f"{prefix}.down_proj_bias", (num, hidden), (expert, slice(None)))

    def _stacked_halves(self) -> tuple[slice, slice]:
        """Where the rank's rows of the gate, and those of up, are among the outputs of both together."""
        rows, size = self._local.rows, self._moe.intermediate_size
        if self._moe.is_interleaved:
            return slice(2 * rows.start, 2 * rows.stop, 2), slice(2 * rows.start + 1, 2 * rows.stop, 2)
        return _as_slice(rows), _as_slice(rows, size)

    def _fill_matrix(
        self, out_OI: Weight, name: str, shape: tuple[int, int], expert: int, outputs: slice, inputs: slice
    ) -> None:
        """Fill a part of a projection whose whole weight has `shape`: its number of outputs, and of inputs."""
        if self._moe.is_interleaved and not self._has_tensor(name + MXFP4_NUMBERS):
            assert isinstance(out_OI, torch.Tensor), "only what is stored quantized is kept"
            part = expert, inputs, outputs
            self._fill(out_OI.t(), name, (self._moe.num_experts, *reversed(shape)), part)
        else:
            self._fill(out_OI, name, (self._moe.num_experts, *shape), (expert, outputs, inputs))


def _halves(weight_OI: Weight) -> tuple[Weight, Weight]:
    """Return the rows of the gate and those of up. They share the weight's memory."""
    half = weight_OI.shape[0] // 2
    return weight_OI[:half], weight_OI[half:]


def _changed(weight: Weight, change: Callable[[torch.Tensor], torch.Tensor]) -> Weight:
    """Return `change` of each of a weight's tensors."""
    assert not isinstance(weight, Fp8Weight | IntegerParts), "experts aren't computed in fp8, nor in several forms"
    return weight.map_tensors(change) if isinstance(weight, IntegerWeight) else change(weight)


def _as_slice(rows: range, offset: int = 0) -> slice:
    return slice(rows.start + offset, rows.stop + offset)
