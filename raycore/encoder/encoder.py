"""An encoder, made of the parts that its family has.

The residual stream, to which blocks add their results, is in float32 whatever the data type is: in 16 bits, the
roundings of its sums would be most of the error of an embedding. Each sum goes through a norm, whose result the next
block gets in the data type.

Names of tensors end in their shapes: T tokens of the step, R those of the T rows that are kept, D hidden size, P
learned positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from raycore.attention.spec import Attention, MixerConstants
from raycore.checkpoint.stages import Stage
from raycore.decoder.attention_mixer import AttentionMixer
from raycore.decoder.decoder import embed
from raycore.decoder.network import NO_TAPS, FollowsPlans, Network, RunLayers, Taps
from raycore.encoder.weights import EncoderLayerWeights, EncoderWeights, NormWeights
from raycore.layers.feed_forward import DenseFeedForward
from raycore.layers.operations import AddNorm, Operations
from raycore.layers.part_place import PartPlace
from raycore.messages import StepPlan
from raycore.models.encoder_spec import EncoderSpec
from raycore.models.spec import ModelSpec
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.experts.parallel import ExpertRanks, SplitExperts
from raycore.profile_session import ProfiledParts
from raycore.step.batch import StepInputs
from raycore.step.copies import to_device
from raycore.step.device_batch import StepTensors

_NEVER = 1 << 40
"""A position that no token has."""


class TokenPlaces(NamedTuple):
    """Where a step's tokens are in their prompts."""

    positions_T: Tensor
    token_types_T: Tensor | None
    """None: all tokens have type 0."""


class Encoder(Network):
    """One tensor-parallel rank's part of an encoder. It computes whole prompts, and has no head for texts."""

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
        self._ranks = ranks
        device = operations.device
        self._embed_VD, self._vocab_start = weights.embed_VD.to(device), weights.vocab_start
        self._first_position = spec.encoder.first_position
        self._places_PD, self._type_stride = _place_table(weights, device)
        self._embedding_norm = _norm(weights.embedding_norm, spec.encoder, operations)
        parts = (part for layer in weights.layers for part in (layer.mixer, layer.feed_forward))
        self.num_weights = sum(part.num_weights(spec) for part in parts)
        self.num_key_value_numbers = 0  # nothing is read from a cache
        self.constants = [MixerConstants()] * spec.num_layers
        self._layers: list[EncoderLayer] = []
        for layer in range(spec.num_layers):
            own = weights.layers.pop(0)
            norms = _layer_norms(spec.encoder, own, weights.layers, weights.final_norm, operations)
            self._layers.append(EncoderLayer(layer, spec, own, norms, ranks, operations))
        self._places: TokenPlaces | None = None

    def around(self, attention: Attention) -> tuple[Attention, list[FollowsPlans]]:
        """Return attention that notes where each step's tokens are, which the embedding depends on, too."""
        placed = _PlacedAttention(attention, self)
        return placed, [placed]

    def note_places(self, places: TokenPlaces) -> None:
        """Remember where the tokens of the step that begins are in their prompts."""
        self._places = places

    def forward(
        self,
        inputs: Tensor,
        attention: Attention,
        rows_R: Tensor | None = None,
        after_layer: Callable[[], None] = lambda: None,
        taps: Taps = NO_TAPS,
        run_layers: RunLayers | None = None,
    ) -> Tensor:
        """Return the final hidden states float32[R, D] of tokens [T]. See `Network.forward`."""
        assert not taps, "encoders have no drafters"
        assert run_layers is None, "encoders' layers aren't recorded"
        stream = self._embed(inputs)
        for layer in self._layers[:-1]:
            stream = layer(stream, attention)
            after_layer()
        return self._layers[-1](stream, attention, rows_R).residual_TD

    def _embed(self, token_ids_T: Tensor) -> ResidualStream:
        """Return the stream of the tokens' embeddings, of which their places in prompts are a part."""
        x_TD = embed(self._embed_VD, self._vocab_start, token_ids_T, self._ranks)
        if self._places_PD is None:
            residual_TD = torch.zeros_like(x_TD, dtype=torch.float32)
        else:
            assert self._places is not None, "`note_places` comes first"
            rows_T = self._places.positions_T + self._first_position
            if self._places.token_types_T is not None and self._type_stride:
                rows_T = rows_T + self._places.token_types_T * self._type_stride
            residual_TD = self._places_PD.index_select(0, rows_T)
        return ResidualStream(*self._embedding_norm(residual_TD, x_TD))

    def parts(self) -> ProfiledParts:
        yield self, {"_embed": "embed_tokens"}
        for layer in self._layers:
            yield layer.mixer, layer.mixer.parts
            yield layer, layer.PARTS


class ResidualStream(NamedTuple):
    """What a layer gets and returns."""

    residual_TD: Tensor
    """In float32."""
    x_TD: Tensor
    """The input of the next layer's attention, in the data type."""


class EncoderLayer:
    """One layer on one rank."""

    PARTS: ClassVar[Mapping[str, str]] = {
        "_norm_after_attention": "attention_layernorm",
        "_norm_after_feed_forward": "mlp_layernorm",
        "feed_forward": "mlp",
    }
    """The names of the layer's parts in profiles, by attribute."""

    def __init__(
        self,
        index: int,
        spec: ModelSpec,
        weights: EncoderLayerWeights,
        norms: tuple[AddNorm, AddNorm],
        ranks: TensorParallel,
        operations: Operations,
    ) -> None:
        """`norms`: of the sums of the residual stream with the result of attention, and with that of feed-forward."""
        self._norm_after_attention, self._norm_after_feed_forward = norms
        place = PartPlace(spec, index, index, ranks, SplitExperts(ranks), operations)
        self.mixer = AttentionMixer(place, weights.mixer)
        self.feed_forward = DenseFeedForward(place, weights.feed_forward)

    def __call__(self, stream: ResidualStream, attention: Attention, rows_R: Tensor | None = None) -> ResidualStream:
        """Return the stream after the layer, or only its rows `rows_R`. May overwrite `stream`."""
        residual_TD = stream.residual_TD
        out_TO = self.mixer(stream.x_TD, attention)
        if rows_R is not None:
            residual_TD, out_TO = residual_TD.index_select(0, rows_R), out_TO.index_select(0, rows_R)
        residual_TD, x_TD = self._norm_after_attention(residual_TD, self.mixer.o(out_TO))
        return ResidualStream(*self._norm_after_feed_forward(residual_TD, self.feed_forward.apply(x_TD)))


def _norm(weights: NormWeights, encoder: EncoderSpec, operations: Operations, *, keeps_sum: bool = False) -> AddNorm:
    return operations.add_layer_norm(weights.weight_D, weights.bias_D, encoder.norm_eps, keeps_sum=keeps_sum)


def _layer_norms(
    encoder: EncoderSpec,
    own: EncoderLayerWeights,
    later: Sequence[EncoderLayerWeights],
    final: NormWeights | None,
    operations: Operations,
) -> tuple[AddNorm, AddNorm]:
    """Return the norms after a layer's two blocks. Norms that come first are those of the block that follows."""
    if not encoder.is_norm_first:
        assert own.attention_norm is not None, "norms come after their blocks"
        return _norm(own.attention_norm, encoder, operations), _norm(own.feed_forward_norm, encoder, operations)
    following = later[0].attention_norm if later else final
    assert following is not None, "only the first layer has no norm of attention"
    return (
        _norm(own.feed_forward_norm, encoder, operations, keeps_sum=True),
        _norm(following, encoder, operations, keeps_sum=bool(later)),
    )


class _PlacedAttention:
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
        self._encoder.note_places(TokenPlaces(tensors.positions_T, token_types_T))
        self._attention.begin(step, tensors)

    def __call__(self, layer: int, qkv_TO: Tensor) -> Tensor:
        """Compute attention in one layer. Returns [T, N · H]."""
        return self._attention(layer, qkv_TO)


def _place_table(weights: EncoderWeights, device: torch.device) -> tuple[Tensor | None, int]:
    """Return what is added to embeddings, in float32: for each type of token, by position, one type after the other.

    The second result is the number of rows of a type. 0: all types are the same.
    """
    positions_PD, types_KD = weights.positions_PD, weights.token_types_KD
    if positions_PD is None:
        return None, 0
    if types_KD is None:
        return positions_PD.float().to(device), 0
    # no more types are ever used
    types_KD = types_KD[:2]
    sums_KPD = types_KD.float()[:, None] + positions_PD.float()[None]
    return sums_KPD.flatten(0, 1).to(device), len(positions_PD) if len(types_KD) > 1 else 0
