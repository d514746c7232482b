"""An encoder, made of the parts that its family has.

It has the interface of a decoder, so that a worker runs its steps alike, but no head for texts. Names of tensors end in
their shapes: T tokens of the step, R those of the T rows that are kept, D hidden size, P learned positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from raycore.attention.spec import Attention
from raycore.checkpoint.stages import Stage
from raycore.decoder.attention_mixer import AttentionMixer
from raycore.decoder.decoder import NO_TAPS, Decoder, Taps, embed
from raycore.encoder.weights import EncoderLayerWeights, EncoderWeights, NormWeights
from raycore.layers.feed_forward import DenseFeedForward
from raycore.layers.linear import Linear
from raycore.layers.operations import Norm, Operations
from raycore.messages import StepPlan
from raycore.models.encoder_spec import EncoderSpec
from raycore.models.spec import ModelSpec
from raycore.parallel.experts import ExpertRanks
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.profile_session import Parts
from raycore.step.batch import StepInputs
from raycore.step.device_batch import StepTensors
from raycore.step.transfers import to_device

_NEVER = 1 << 40
"""A position that no token has."""


class Places(NamedTuple):
    """Where a step's tokens are in their prompts."""

    positions_T: Tensor
    token_types_T: Tensor | None
    """None: all tokens have type 0."""


class Encoder(Decoder):
    """One tensor-parallel rank's part of an encoder."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: EncoderWeights,
        ranks: TensorParallel,
        operations: Operations,
        experts: ExpertRanks | None = None,
        stage: Stage | None = None,
    ) -> None:
        """Build the layers from `weights`. Removes each layer from `weights` once it is built."""
        assert spec.encoder is not None, "it is an encoder"
        self.stage = stage or Stage.whole(spec)
        self.vocab_size, self.hidden_size, self.dtype = spec.vocab_size, spec.hidden_size, weights.embed_VD.dtype
        self._ranks, self._operations = ranks, operations
        device = operations.device
        self._embed_VD, self._vocab_start = weights.embed_VD.to(device), weights.vocab_start
        self._first_position = spec.encoder.first_position
        self._places_PD, self._type_stride = _place_table(weights, device)
        make = _NormMaker(spec.encoder, operations)
        self._embedding_norm = make(weights.embedding_norm)
        self._final_norm = make(weights.final_norm)
        self.num_weights = sum(_num_weights(layer) for layer in weights.layers)
        self.num_key_value_numbers = 0  # nothing is read from a cache
        self.qk_norms_NH = [None] * spec.num_layers
        self.sinks_N = [None] * spec.num_layers
        self.state_constants = [{}] * spec.num_layers
        self.sparse_layers = []
        self._layers: list[EncoderLayer] = []  # pyright: ignore[reportIncompatibleVariableOverride]
        for layer in range(spec.num_layers):
            self._layers.append(EncoderLayer(layer, spec, weights.layers.pop(0), ranks, operations, make))
        self._places: Places | None = None

    def around(self, attention: Attention) -> PlacedAttention:
        """Return attention that notes where each step's tokens are, which the embedding depends on, too."""
        return PlacedAttention(attention, self)

    def note_places(self, places: Places) -> None:
        """Remember where the tokens of the step that begins are in their prompts."""
        self._places = places

    def forward(
        self,
        inputs: Tensor,
        attention: Attention,
        rows_R: Tensor | None = None,
        after_layer: Callable[[], None] = lambda: None,
        taps: Taps = NO_TAPS,
    ) -> Tensor:
        """Return the final hidden states [R, D] of tokens [T]. See `Decoder.forward`."""
        assert not taps, "encoders have no drafters"
        h_TD = self.embed(inputs)
        last = self._layers[-1]
        for layer in self._layers[:-1]:
            h_TD = layer(h_TD, attention)
            after_layer()
        h_RD = last(h_TD, attention, rows_R)
        return h_RD if self._final_norm is None else self._final_norm(h_RD)

    def embed(self, token_ids_T: Tensor) -> Tensor:
        """Return the tokens' embeddings [T, D], of which their places in prompts are a part."""
        h_TD = embed(self._embed_VD, self._vocab_start, token_ids_T, self._ranks)
        if self._places_PD is not None:
            assert self._places is not None, "`note_places` comes first"
            rows_T = self._places.positions_T + self._first_position
            if self._places.token_types_T is not None and self._type_stride:
                rows_T = rows_T + self._places.token_types_T * self._type_stride
            h_TD += self._places_PD.index_select(0, rows_T)
        assert self._embedding_norm is not None
        return self._embedding_norm(h_TD)

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Never called: encoders pool."""
        raise AssertionError("an encoder has no head for texts")

    def parts(self) -> Parts:
        """The parts of a step, for profiles. Attention is not among them."""
        yield self, {"embed": "embed_tokens"}
        if self._final_norm is not None:
            yield self, {"_final_norm": "norm"}
        for layer in self._layers:
            yield layer.mixer, layer.mixer.parts
            yield layer, layer.parts

    def forward_nothing(self) -> None:
        """Do nothing: engines share no layers of an encoder."""


class EncoderLayer:
    """One layer on one rank."""

    _PARTS: ClassVar[Mapping[str, str]] = {
        "_attention_norm": "attention_layernorm",
        "_feed_forward_norm": "mlp_layernorm",
        "feed_forward": "mlp",
    }

    def __init__(
        self,
        index: int,
        spec: ModelSpec,
        weights: EncoderLayerWeights,
        ranks: TensorParallel,
        operations: Operations,
        make_norm: _NormMaker,
    ) -> None:
        assert spec.encoder is not None, "it is an encoder"
        self._is_norm_first = spec.encoder.is_norm_first
        self._attention_norm = make_norm(weights.attention_norm)
        self._feed_forward_norm = make_norm(weights.feed_forward_norm)
        self.mixer = AttentionMixer(index, index, spec, weights.mixer, ranks, operations, _unadapted)
        own = weights.feed_forward
        if spec.is_gated:
            gate_up = operations.gated_linear(own.gate_up_FD, own.gate_up_bias, gate=spec.gate)
        else:
            gate_up = operations.activated_linear(own.gate_up_FD, own.gate_up_bias, spec.gate)
        self.feed_forward = DenseFeedForward(gate_up, operations.linear(own.down_DF, own.down_bias, ranks))

    @property
    def parts(self) -> Mapping[str, str]:
        """The names of the layer's parts in profiles, by attribute."""
        return {name: part for name, part in self._PARTS.items() if getattr(self, name) is not None}

    def __call__(self, h_TD: Tensor, attention: Attention, rows_R: Tensor | None = None) -> Tensor:
        """Return the layer's output for hidden states, or only for their rows `rows_R`. Overwrites `h_TD`."""
        first, second = self._attention_norm, self._feed_forward_norm
        assert second is not None
        x_TD = h_TD if not self._is_norm_first or first is None else first(h_TD)
        out_TO = self.mixer(x_TD, attention)
        if rows_R is not None:
            h_TD, out_TO = h_TD.index_select(0, rows_R), out_TO.index_select(0, rows_R)
        h_TD = self.mixer.o.add_to(h_TD, out_TO)
        if self._is_norm_first:
            return self.feed_forward.add_to(h_TD, second(h_TD))
        assert first is not None
        h_TD = first(h_TD)
        return second(self.feed_forward.add_to(h_TD, h_TD))


class _NormMaker:
    """Makes an encoder's norms."""

    def __init__(self, encoder: EncoderSpec, operations: Operations) -> None:
        self._eps = encoder.norm_eps
        self._operations = operations

    def __call__(self, weights: NormWeights | None) -> Norm | None:
        """Return the norm with these weights. None: there is no such norm."""
        return None if weights is None else self._operations.layer_norm(weights.weight_D, weights.bias_D, self._eps)


class PlacedAttention:
    """Attention that tells an encoder where a step's tokens are."""

    def __init__(self, attention: Attention, encoder: Encoder) -> None:
        self._attention = attention
        self._encoder = encoder
        self._second_texts: dict[int, int] = {}
        """By slot, for requests with two texts: the position at which the second one begins."""

    def apply(self, plan: StepPlan) -> None:
        """Apply the plan's freed slots and new requests, in this order."""
        for slot in plan.freed_slots:
            self._second_texts.pop(slot, None)
        for new in plan.new_requests:
            if new.second_text:
                self._second_texts[new.slot] = new.second_text

    def begin(self, step: StepInputs, tensors: StepTensors) -> None:
        """Prepare for the layers of `step`."""
        token_types_T: Tensor | None = None
        if self._second_texts:
            begins = [self._second_texts.get(slot, _NEVER) for slot in step.slots.tolist()]
            types = step.positions >= np.repeat(np.array(begins, np.int64), step.counts)
            token_types_T = to_device(types.astype(np.int64), tensors.positions_T.device)
        self._encoder.note_places(Places(tensors.positions_T, token_types_T))
        self._attention.begin(step, tensors)

    def __call__(self, layer: int, qkv_TO: Tensor) -> Tensor:
        """Compute attention in one layer. Returns [T, N · H]."""
        return self._attention(layer, qkv_TO)


def _place_table(weights: EncoderWeights, device: torch.device) -> tuple[Tensor | None, int]:
    """Return what is added to embeddings: for each type of token, by position, one type after the other.

    The second result is the number of rows of a type. 0: all types are the same.
    """
    positions_PD, types_KD = weights.positions_PD, weights.token_types_KD
    if positions_PD is None:
        return None, 0
    if types_KD is None:
        return positions_PD.to(device), 0
    # no more types are ever used
    types_KD = types_KD[:2]
    sums_KPD = types_KD.float()[:, None] + positions_PD.float()[None]
    return sums_KPD.flatten(0, 1).to(positions_PD.dtype).to(device), len(positions_PD) if len(types_KD) > 1 else 0


def _num_weights(layer: EncoderLayerWeights) -> int:
    own = layer.feed_forward
    return layer.mixer.num_weights + own.gate_up_FD.numel() + own.down_DF.numel()


def _unadapted(linear: Linear, name: str, ranks: TensorParallel | None) -> Linear:
    return linear
