"""Layers with several streams of hidden states, as config.json describes them. Does not import torch.

A layer predicts all streams from all of them, computes with one, the *active* one, and corrects the others by what that
gives (AltUp, arXiv 2301.13310). Beside attention, there is a network of low rank (LAuReL, arXiv 2411.07501).
"""

from __future__ import annotations

__all__ = ["StreamsSpec"]

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from raycore.models.closing import ClosingSpec, closing_linears
from raycore.models.layer_part import ROWS, PartTensor, Refusable
from raycore.models.linears import FusedLinear
from raycore.models.rows import whole

if TYPE_CHECKING:
    from raycore.models.spec import ModelSpec

_FLOAT32_BYTES = 4


class StreamsSpec(ClosingSpec, frozen=True, kw_only=True):
    """The feed-forward part of such a layer, with what is around its attention."""

    num_streams: int
    active: int
    """The number of the active stream, from 0 on."""
    laurel_rank: int
    cutoff: float | None = None
    """Of each token's gate, what is not so many standard deviations above the mean becomes 0, and that is subtracted
    from the rest. None: the gate stays as it is."""
    scales_active: bool = True
    """Whether the gate of the layer's own input reads the active stream times `active_scale_D`."""

    refused: ClassVar[Mapping[Refusable, str]] = {"heads": "has layers with several streams of hidden states"}
    computed_by: ClassVar[str] = "raycore.layers.streams.StreamsFeedForward"
    weights_class: ClassVar[str] = "raycore.layers.streams.StreamsWeights"
    described: ClassVar[str] = "has several streams of hidden states"
    by_torch: ClassVar[str] = "streams of hidden states"
    depends_on_threads: ClassVar[bool] = True

    def linears(
        self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1, num_inputs: int | None = None
    ) -> tuple[FusedLinear, ...]:
        left = whole("laurel.linear_left", self.laurel_rank)
        right = whole("laurel.linear_right", model.hidden_size)
        dense = super(ClosingSpec, self).linears(model, tp_rank, tp_size, num_inputs)
        return (
            *dense,
            *closing_linears(self, model),
            FusedLinear("left_RD", (left,), whole("", model.hidden_size), adapted="laurel_left"),
            FusedLinear("right_DR", (right,), left, adapted="laurel_right"),
        )

    def vectors(self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1) -> tuple[PartTensor, ...]:
        of_hidden = {
            "input_norm_D": "post_per_layer_input_norm.weight",
            "laurel_norm_D": "laurel.post_laurel_norm.weight",
            "router_norm_D": "altup.router_norm.weight",
            "active_scale_D": "altup.correct_output_scale",
        }
        num = self.num_streams
        matrices = {
            "router_SD": ("modality_router", num, model.hidden_size),
            "prediction_XS": ("prediction_coefs", num * num, num),
            "correction_SS": ("correction_coefs", num, num),
        }
        return (
            *(PartTensor(field, (whole(name, model.hidden_size),)) for field, name in of_hidden.items()),
            *(
                PartTensor(field, (whole(f"altup.{name}.weight", num_rows),), (ROWS, width))
                for field, (name, num_rows, width) in matrices.items()
            ),
        )

    def token_bytes(
        self, model: ModelSpec, mixed: int, tp_size: int, item_size: int, num_engines: int, *, is_native: bool
    ) -> int:
        own = super().token_bytes(model, mixed, tp_size, item_size, num_engines, is_native=is_native)
        if self.cutoff is not None:
            own += 2 * self.intermediate_size // tp_size * (item_size + _FLOAT32_BYTES)
        return own + 4 * self.num_streams * model.hidden_size * item_size
