"""A decoder whose layers have several streams of hidden states, which are beside each other in a row: [T, S · D].

Shape suffixes: T tokens of the step, D hidden size, S streams, I inputs of the projections, X all streams.
"""

from __future__ import annotations

import math
from typing import cast

from torch import Tensor

from raycore.attention.spec import Attention
from raycore.decoder.decoder import Decoder, Layer
from raycore.layers.streams import StreamsFeedForward
from raycore.models.spec import ModelSpec


class StreamsDecoder(Decoder):
    """One tensor-parallel rank's part of such a decoder."""

    @classmethod
    def layer_class(cls, spec: ModelSpec) -> type[Layer]:
        return StreamsLayer

    def _begun(self, inputs: Tensor) -> Tensor:
        h_TD = super()._begun(inputs)
        assert self._layer_inputs is not None, "there is one stage"
        return self._layer_inputs.streams(h_TD)

    def _ended(self, h_TD: Tensor) -> Tensor:
        assert self._layer_inputs is not None, "there is one stage"
        return self._layer_inputs.one_stream(h_TD)


class StreamsLayer(Layer):
    """A layer with several streams of hidden states."""

    def __call__(self, h_TD: Tensor, attention: Attention, rows_R: Tensor | None = None) -> Tensor:
        part = cast("StreamsFeedForward", self.feed_forward)
        assert self.input_norm is not None, "such layers have norms before their blocks"
        predicted_TSD, active = part.predicted(h_TD), part.active
        x_TD = self.input_norm(predicted_TSD[:, active].contiguous())
        out_TO = self.mixer(x_TD, attention)
        if rows_R is not None:
            predicted_TSD, x_TD, out_TO = (each.index_select(0, rows_R) for each in (predicted_TSD, x_TD, out_TO))
        laurel_TD = part.laurel(x_TD)
        mixed_TD = self._add(predicted_TSD[:, active].clone(), self.mixer.o(out_TO), self._after_attention)
        mixed_TD.add_(laurel_TD).div_(math.sqrt(2))
        assert self._post_norm is not None, "such layers have norms before their blocks"
        ffw_TD = part.apply(self._post_norm(mixed_TD))
        return part.corrected(predicted_TSD, self._add(mixed_TD, ffw_TD, self._after_feed_forward))
