"""The dense feed-forward part that ends a layer of Gemma 4, as config.json describes it. Does not import torch.

Its result is normalized and added to hidden states. Then the layer's own input of each token may be added, through a
gate that hidden states make, and a number multiplies all.
"""

from __future__ import annotations

__all__ = ["ClosingSpec", "LayerInputsSpec"]

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from raycore.models.feed_forward import DenseSpec
from raycore.models.layer_part import ROWS, LayerPart, PartTensor, Refusable
from raycore.models.linears import FusedLinear
from raycore.models.rows import Rows, whole

if TYPE_CHECKING:
    from raycore.models.spec import ModelSpec

_FLOAT32_BYTES = 4
_OF_TOKENS = "has layers with inputs of their own, which are made of tokens in the first stage"


class LayerInputsSpec(LayerPart, frozen=True):
    """What makes the input of its own that each layer has for a token: a vector of the token, and a linear function of
    its embedding. It belongs to the first stage, and no layer has it."""

    size: int
    """Number of elements of such an input."""
    num_tokens: int
    """Number of tokens that have vectors, the first ones of the vocabulary. Others have that of token 0."""
    num_streams: int = 1
    """See `StreamsSpec`. 1: layers have one stream of hidden states."""

    computed_by: ClassVar[str] = "raycore.layers.layer_inputs.LayerInputs"
    weights_class: ClassVar[str] = "raycore.layers.layer_inputs.LayerInputsWeights"
    described: ClassVar[str] = "has inputs of layers"
    refused: ClassVar[Mapping[Refusable, str]] = dict.fromkeys(
        ("stages", "prompt_embeds", "draft_model", "roofline"), _OF_TOKENS
    )

    def linears(
        self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1, num_inputs: int | None = None
    ) -> tuple[FusedLinear, ...]:
        outputs, hidden = whole("per_layer_model_projection", model.num_layers * self.size), model.hidden_size
        streams = {"streams_in_XD": "altup_projections", "streams_out_XD": "altup_unembed_projections"}
        others = {
            field: tuple(whole(f"{name}.{at}", hidden) for at in range(self.num_streams - 1))
            for field, name in streams.items()
        }
        return tuple(
            FusedLinear(field, rows, whole("", hidden), is_plain=True)
            for field, rows in ({"projection_OD": (outputs,)} | others).items()
            if rows
        )

    def vectors(self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1) -> tuple[PartTensor, ...]:
        start, end = (rank * self.num_tokens // tp_size for rank in (tp_rank, tp_rank + 1))
        rows = Rows("embed_tokens_per_layer.weight", self.num_tokens, start, end - start)
        return (
            PartTensor("table_VO", (rows,), (ROWS, model.num_layers * self.size)),
            PartTensor("norm_P", (whole("per_layer_projection_norm.weight", self.size),)),
        )


class ClosingSpec(DenseSpec, frozen=True, kw_only=True, tag=True):
    """Such a part of one layer."""

    intermediate_size: int
    input_size: int | None = None
    """Number of elements of the layer's own input. None: it has none."""
    size_key: str = "intermediate_size"
    """How `intermediate_size` follows from config.json."""

    computed_by: ClassVar[str] = "raycore.layers.closing.ClosingFeedForward"
    weights_class: ClassVar[str] = "raycore.layers.closing.ClosingWeights"
    described: ClassVar[str] = "has a feed-forward part that ends a layer"

    def width(self, model: ModelSpec) -> int:
        return self.intermediate_size

    def linears(
        self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1, num_inputs: int | None = None
    ) -> tuple[FusedLinear, ...]:
        dense = super().linears(model, tp_rank, tp_size, num_inputs)
        return dense + closing_linears(self, model)

    def vectors(self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1) -> tuple[PartTensor, ...]:
        return closing_vectors(self, model)

    def split_sizes(self, model: ModelSpec, *, expert_parallel: bool) -> dict[str, int]:
        return {self.size_key: self.intermediate_size}

    def token_bytes(
        self, model: ModelSpec, mixed: int, tp_size: int, item_size: int, num_engines: int, *, is_native: bool
    ) -> int:
        own = super().token_bytes(model, mixed, tp_size, item_size, num_engines, is_native=is_native)
        return own + closing_bytes(self, model, item_size)


def closing_linears(part: ClosingSpec, model: ModelSpec) -> tuple[FusedLinear, ...]:
    """Return the linear layers of a layer's own input, which every rank has whole."""
    if part.input_size is None:
        return ()
    hidden = whole("per_layer_projection", model.hidden_size)
    gate = whole("per_layer_input_gate", part.input_size)
    return (
        FusedLinear("input_gate_PD", (gate,), whole("", model.hidden_size), adapted="layer_input_gate"),
        FusedLinear("input_out_DP", (hidden,), gate, adapted="layer_input"),
    )


def closing_vectors(part: ClosingSpec, model: ModelSpec) -> tuple[PartTensor, ...]:
    """Return the norms at the end of a layer, and what multiplies hidden states there."""
    names = {"after_D": "post_feedforward_layernorm"}
    if part.input_size is not None:
        names["input_norm_D"] = "post_per_layer_input_norm"
    norms = (PartTensor(field, (whole(f"{name}.weight", model.hidden_size),)) for field, name in names.items())
    return *norms, PartTensor("scalar_1", (whole("layer_scalar", 1),))


def closing_bytes(part: ClosingSpec, model: ModelSpec, item_size: int) -> int:
    """Return an upper bound on what a token needs there: its inputs of all layers, and copies of hidden states."""
    inputs = 0 if part.input_size is None else (model.num_layers + 1) * part.input_size
    return (inputs + model.hidden_size) * (item_size + _FLOAT32_BYTES)
