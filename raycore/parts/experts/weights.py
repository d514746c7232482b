"""Allocates one rank's experts, and has them filled from a checkpoint.

There are two formats of experts in checkpoints. In one, each expert has tensors of its own; transformers 4 writes this
format, and so does transformers 5 by default. In the other, all experts of a layer are stacked in one tensor, as
transformers 5 has them in memory: see `MoeSpec.is_transposed`. Shape suffixes: E the rank's experts, D hidden size, F
the rank's rows of each expert (2F where gate and up are fused).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from raycore.models.feed_forward import HasTensor
from raycore.models.quantization import WeightScheme, stored_scheme
from raycore.models.spec import ModelSpec
from raycore.parts.experts.models import ExpertShare, MoeSpec, experts_of
from raycore.weights.fp8_weight import Fp8Weight
from raycore.weights.integer_parts import IntegerParts
from raycore.weights.integer_weight import IntegerWeight, kept_group_size
from raycore.weights.layer_part_weights import LayerPartWeights
from raycore.weights.share import WeightShare
from raycore.weights.weight import Fill, Part, Weight


class ExpertWeights(NamedTuple):
    """The weights of one expert, or of a rank's rows of it. Or, with one dimension more, those of several experts."""

    gate_up_FD: Weight
    """The rows of the gate, then those of up. Without a gate, only the latter."""
    down_DF: Weight
    gate_up_bias_F: torch.Tensor | None = None
    down_bias_D: torch.Tensor | None = None

    def map_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> ExpertWeights:
        """Return `change` of each tensor."""
        biases = (None if each is None else change(each) for each in self[2:])
        return ExpertWeights(_changed(self.gate_up_FD, change), _changed(self.down_DF, change), *biases)

    def expert(self, index: int) -> ExpertWeights:
        """Return those of one of several experts. They share the memory of all."""
        return self.map_tensors(lambda each: each[index])

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those that there are. The weights may not be quantized."""
        assert isinstance(self.gate_up_FD, torch.Tensor), "ranks that exchange experts have converted them"
        assert isinstance(self.down_DF, torch.Tensor), "ranks that exchange experts have converted them"
        biases = self.gate_up_bias_F, self.down_bias_D
        return [self.gate_up_FD, self.down_DF, *(bias for bias in biases if bias is not None)]


@dataclass
class MoeWeights(LayerPartWeights):
    """The router, the experts and the shared experts of one sparse layer on one rank."""

    router_ED: torch.Tensor
    """One row for each of the layer's experts, those of other ranks included."""
    first_expert: int
    """The index of the rank's first expert."""
    gate_up_EFD: Weight
    """For each of the rank's experts, its gate rows, then its up rows. Without a gate, only the latter."""
    down_EDF: Weight
    correction_E: torch.Tensor | None = None
    """float32: see `ExpertChoice.has_correction`."""
    into_ID: Weight | None = None
    """The linear layer before the experts, of which every rank has all: see `MoeSpec.inner_size`."""
    out_DI: Weight | None = None
    """That after them."""
    shared_gate_up_FD: Weight | None = None
    """Of the shared experts: this rank's gate rows, then its up rows. Without a gate, only the latter."""
    shared_down_DF: Weight | None = None
    shared_gate_1D: torch.Tensor | None = None
    """The weight of the gate of their result, which every rank has whole."""
    router_bias_E: torch.Tensor | None = None
    scales_E: torch.Tensor | None = None
    """Multiply the weights that the router gives to experts."""
    gate_up_bias_EF: torch.Tensor | None = None
    down_bias_ED: torch.Tensor | None = None
    """None on ranks that don't have the first row of each expert, because the sum over ranks must include it once."""

    NAMES: ClassVar[Mapping[str, str]] = {
        "router_ED": "mlp.gate.weight",
        "router_bias_E": "mlp.gate.bias",
        "scales_E": "mlp.gate.per_expert_scale",
        "correction_E": "mlp.gate.e_score_correction_bias",
        "into_ID": "mlp.fc1_latent_proj.weight",
        "out_DI": "mlp.fc2_latent_proj.weight",
        "shared_gate_up_FD": "mlp.shared_experts.gate_up_proj.weight",
        "shared_down_DF": "mlp.shared_experts.down_proj.weight",
        "shared_gate_1D": "mlp.shared_expert_gate.weight",
        "gate_up_EFD": "mlp.experts.gate_up_proj",
        "down_EDF": "mlp.experts.down_proj",
        "gate_up_bias_EF": "mlp.experts.gate_up_proj_bias",
        "down_bias_ED": "mlp.experts.down_proj_bias",
    }
    MULTIPLIED: ClassVar[tuple[str, ...]] = (
        *("router_ED", "into_ID", "out_DI", "shared_gate_up_FD", "shared_down_DF"),
    )

    @staticmethod
    def other_fields(
        part: MoeSpec, prefix: str, share: WeightShare, has_tensor: HasTensor, fill: Fill
    ) -> dict[str, Any]:
        return _ExpertLayout(part, share, has_tensor, fill).fields(prefix)

    def num_weights(self, model: ModelSpec) -> int:
        moe, num = experts_of(model), self.gate_up_EFD.numel() + self.down_EDF.numel()
        return super().num_weights(model) + int(moe.num_experts_per_tok / moe.num_experts * num)

    @property
    def stacked(self) -> ExpertWeights:
        """The weights of the rank's experts."""
        return ExpertWeights(self.gate_up_EFD, self.down_EDF, self.gate_up_bias_EF, self.down_bias_ED)

    def expert(self, index: int) -> ExpertWeights:
        """Return the weights of one of the rank's experts. They share the memory of all."""
        return self.stacked.expert(index)


class _ExpertLayout:
    """Allocates one rank's experts of a layer and has `fill` fill them, possibly after `fields()` has returned."""

    def __init__(self, moe: MoeSpec, share: WeightShare, has_tensor: HasTensor, fill: Fill) -> None:
        self._moe = moe
        self._share = share
        self._local: ExpertShare = share.experts or moe.split_experts(share.tp_rank, share.tp_size)
        self._width = moe.width(share.spec)
        self._has_tensor = has_tensor
        self._fill = fill

    def fields(self, prefix: str) -> dict[str, Any]:
        """Allocate the weights of the layer whose tensors' names begin with `prefix`."""
        share, local, width, moe = self._share, self._local, self._width, self._moe
        num_rows = len(moe.gate_and_up) * len(local.rows)
        has_bias, is_first = moe.has_bias, local.rows.start == 0
        stacked, up = moe.names.stacked, moe.names.stacked.up
        read, down = (
            self._kept(prefix, *names)
            for names in (
                (moe.gate_and_up, [stacked.gate_up, *([] if up is None else [up])]),
                ([moe.names.down], [stacked.down]),
            )
        )
        own = ExpertWeights(
            self._empty_experts(read, num_rows, width),
            self._empty_experts(down, width, len(local.rows), local.rows.start),
            share.empty(len(local.experts), num_rows) if has_bias else None,
            share.empty(len(local.experts), width) if has_bias and is_first else None,
        )
        for index, expert in enumerate(local.experts):
            self._fill_expert(f"{prefix}{moe.block}", expert, own.expert(index))
        names = "gate_up_EFD", "down_EDF", "gate_up_bias_EF", "down_bias_ED"
        return {"first_expert": local.experts.start} | dict(zip(names, own, strict=True))

    def _kept(self, prefix: str, names: list[str], stacked: list[str]) -> WeightScheme | None:
        """Return how projections of a layer's experts are stored. None: they are converted, because no kernel here
        multiplies with them, or they aren't all stored alike.

        Args:
            names: of the projections of one expert.
            stacked: of the tensors that have those of all experts.
        """
        quantization, moe, formats = self._share.spec.quantization, self._moe, self._share.formats
        # what config.json has as quantized isn't if there are ordinary tensors
        if quantization is None or self._is_transposed:
            return None
        if quantization.experts is not None and moe.form != "stacked":
            return quantization.experts if formats.packs(quantization.experts) else None
        block, experts = f"{prefix}{moe.block}", self._local.experts
        tensors = [f"{block}experts.{expert}.{name}.weight" for expert in experts for name in names]
        if moe.form != "single":
            tensors = [block + name for name in stacked]
        stored = {stored_scheme(quantization, self._has_tensor, name) for name in tensors}
        scheme = stored.pop()
        return scheme if not stored and formats.packs(scheme) else None

    def _empty_experts(
        self, scheme: WeightScheme | None, num_rows: int, num_columns: int, first_column: int = 0
    ) -> Weight:
        """Allocate one projection of all of the rank's experts.

        Args:
            scheme: how they are stored, and kept. None: they are converted.
            first_column: where the rank's part begins.
        """
        share, num = self._share, len(self._local.experts)
        size = num * num_rows, num_columns
        group_size = None if scheme is None else kept_group_size(scheme, num_columns, first_column)
        if scheme is not None and group_size is not None:
            short_rows = share.formats.short_rows
            stacked = IntegerWeight.stored(scheme, group_size, size, share.device, short_rows=short_rows)
        elif share.formats.others == "integers" and num_columns % 4 == 0 and not self._is_transposed:
            stacked = IntegerWeight.empty(*size, 8, num_columns, 8, share.device)
        else:
            return share.empty(num, num_rows, num_columns)
        return stacked.map_tensors(lambda each: each.view(num, num_rows, each.shape[1]))

    @property
    def _is_transposed(self) -> bool:
        """Whether the checkpoint has a row for each input."""
        return self._moe.is_transposed and self._moe.form == "stacked"

    def _fill_expert(self, prefix: str, expert: int, out: ExpertWeights) -> None:
        moe, width, rows, every = self._moe, self._width, self._local.rows, slice(None)
        size, own, names, num = moe.intermediate_size, slice(rows.start, rows.stop), moe.names, len(moe.gate_and_up)
        if moe.form == "single":
            of_expert = f"{prefix}experts.{expert}."
            read, down = [of_expert + name for name in moe.gate_and_up], of_expert + names.down
            num_rows, parts = size, [own] * num
        elif names.stacked.up is not None:
            read, down = [prefix + names.stacked.gate_up, prefix + names.stacked.up], prefix + names.stacked.down
            num_rows, parts = size, [own] * num
        else:
            read, down = [prefix + names.stacked.gate_up] * num, prefix + names.stacked.down
            num_rows, parts = num * size, [slice(at * size + rows.start, at * size + rows.stop) for at in range(num)]
            if moe.is_interleaved:
                parts = [slice(num * rows.start + at, num * rows.stop, num) for at in range(num)]
        num_own, bias_F = len(rows), out.gate_up_bias_F
        biases = [None] * num if bias_F is None else bias_F.chunk(num)
        for at, (name, part, bias) in enumerate(zip(read, parts, biases, strict=True)):
            own_FD = out.gate_up_FD[at * num_own : (at + 1) * num_own]
            self._fill_projection(own_FD, bias, name, (num_rows, width), expert, (part, every))
        self._fill_projection(out.down_DF, out.down_bias_D, down, (width, size), expert, (every, own))

    def _fill_projection(
        self, out_OI: Weight, bias_O: torch.Tensor | None, name: str, shape: tuple[int, int], expert: int, part: Part
    ) -> None:
        """Fill a part of a projection whose whole weight has `shape`: its number of outputs, and of inputs."""
        is_single, num, (outputs, inputs) = self._moe.form == "single", self._moe.num_experts, part
        stacked, index = ((), ()) if is_single else ((num,), (expert,))
        if self._is_transposed:
            assert isinstance(out_OI, torch.Tensor), "integers are made of whole rows"
            self._fill(out_OI.t(), name, (num, *reversed(shape)), (expert, inputs, outputs))
        else:
            self._fill(out_OI, f"{name}.weight" if is_single else name, (*stacked, *shape), (*index, outputs, inputs))
        if bias_O is not None:
            self._fill(bias_O, f"{name}{'.' if is_single else '_'}bias", (*stacked, shape[0]), (*index, outputs))


def _changed(weight: Weight, change: Callable[[torch.Tensor], torch.Tensor]) -> Weight:
    """Return `change` of each of a weight's tensors."""
    assert not isinstance(weight, Fp8Weight | IntegerParts), "experts aren't computed in fp8, nor in several forms"
    return weight.map_tensors(change) if isinstance(weight, IntegerWeight) else change(weight)
