"""A decoder, made of the parts that its family has.

This module decides the order of a layer's operations; the operations are in `operations`, `attention` and
`feed_forward`. Names of tensors end in their shapes: T tokens of the step, R those of the T rows that are kept, D
hidden size, O fused query, key and value rows, N heads, H elements of a head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import compress
from typing import Any, ClassVar

import torch
from torch import Tensor

from raycore.attention.spec import Attention
from raycore.checkpoint.stages import Stage
from raycore.decoder.mixer import Mixer
from raycore.decoder.network import NO_TAPS, ComputeLayer, Network, RunLayers, Taps, WeightParts
from raycore.layers.feed_forward import FeedForward
from raycore.layers.handed import Handed
from raycore.layers.integer_linear import IntegerEmbedding, IntegerLinear
from raycore.layers.layer_inputs import LayerInputs
from raycore.layers.operations import Norm, Operations
from raycore.layers.part_place import Adapt, PartPlace, unadapted
from raycore.models.spec import BlockSum, ModelSpec
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.adapters.layers import Adapters
from raycore.parts.experts.parallel import ExpertRanks, SplitExperts
from raycore.profile_session import ProfiledParts
from raycore.weights.fp8_weight import Fp8Weight
from raycore.weights.integer_parts import IntegerParts
from raycore.weights.integer_weight import IntegerWeight
from raycore.weights.loader import DecoderWeights, LayerWeights
from raycore.weights.named import dense_tensors

_NORMS = (
    "before_attention_D",
    "after_attention_D",
    "before_feed_forward_D",
    "after_feed_forward_D",
)
"""The fields of `LayerWeights` that are weights of norms."""


class Decoder(Network):
    """One tensor-parallel rank's part of a decoder, or of one of its stages. Its vocabulary is itself."""

    takes_taps = True
    _OUTSIDE_LAYERS: ClassVar[Mapping[str, str]] = {
        "embedding": "_embed_VD",
        "head": "_lm_head",
        "head_bias_V": "_head_bias_V",
        "final_norm_D": "_final_norm_D",
        "final_norm": "_final_norm",
        "layer_inputs": "_layer_inputs",
    }
    """Attributes that have weights, by their names in `WeightParts`."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        ranks: TensorParallel,
        operations: Operations,
        experts: ExpertRanks | None = None,
        stage: Stage | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        """Build the layers from `weights`. Removes each layer from `weights` once it is built.

        Args:
            experts: the ranks that share the experts. None: the tensor-parallel ranks, each with a part of every
                expert.
            stage: which part of the model `weights` are. None: the whole model.
            adapters: LoRA adapters, which change what linear layers return. None: there are none.
        """
        self._ranks = ranks
        self._operations = operations
        self.stage = stage = stage or Stage.whole(spec)
        self.vocab_size = spec.vocab_size
        self.hidden_size = spec.hidden_size
        self.dtype = _dtype_of(weights)
        embed_VD, lm_head_VD = weights.embed_VD, weights.lm_head_VD
        self._embed_VD = embed_VD.to(operations.device) if isinstance(embed_VD, Tensor) else None
        self._vocab_start = weights.vocab_start
        multiplier = spec.embedding_multiplier
        if spec.rounds_embedding_multiplier:
            multiplier = float(torch.tensor(multiplier, dtype=self.dtype))
        self._embedding_multiplier = multiplier
        self._logits_multiplier = spec.logits_multiplier
        self._logits_softcap = spec.logits_softcap
        self._has_head = lm_head_VD is not None
        self._head_bias_V = None if weights.head_bias_V is None else weights.head_bias_V.to(operations.device)
        self.num_weights = sum(num_weights(spec, layer) for layer in weights.layers)
        if lm_head_VD is not None:
            self._is_tied = lm_head_VD is embed_VD
            head_VD = self._embed_VD if self._is_tied and self._embed_VD is not None else lm_head_VD
            self._lm_head = operations.head(head_VD, is_tied=self._is_tied)
            self.num_weights += lm_head_VD.numel()
            if isinstance(embed_VD, IntegerWeight):
                assert self._is_tied, "an embedding without its head is a tensor"
                assert isinstance(self._lm_head, IntegerLinear)
                self._embed_VD = IntegerEmbedding(self._lm_head, self.dtype)
        if weights.final_norm_D is not None:
            self._final_norm_D = weights.final_norm_D
            self._final_norm = _norm(weights.final_norm_D, spec, operations)
        self.num_key_value_numbers = sum(spec.mixers[layer].cached_numbers(spec, ranks.size) for layer in stage.layers)
        self._layers: list[Layer] = []
        experts = experts or SplitExperts(ranks)
        make, self._handed = self.layer_class(spec), Handed()
        self._layer_inputs: LayerInputs | None = None
        if spec.layer_inputs is not None and weights.layer_inputs is not None:
            place = PartPlace(spec, 0, 0, ranks, experts, operations)
            self._layer_inputs = place.make(spec.layer_inputs, weights.layer_inputs)
        for stage_index, layer in enumerate(stage.layers):
            own = weights.layers.pop(0)
            self._layers.append(make(stage_index, layer, spec, own, ranks, experts, operations, adapters, self._handed))
        self.constants = [layer.mixer.constants for layer in self._layers]
        layers: list[Any] = self._layers
        has_experts = (spec.feed_forwards[layer].has_experts for layer in stage.layers)
        self.sparse_layers = [layer.feed_forward for layer in compress(layers, has_experts)]

    def forward(
        self,
        inputs: Tensor,
        attention: Attention,
        rows_R: Tensor | None = None,
        after_layer: Callable[[], None] = lambda: None,
        taps: Taps = NO_TAPS,
        run_layers: RunLayers | None = None,
    ) -> Tensor:
        h_TD = self._begun(inputs)
        run_layers = run_layers or _run_one_by_one
        keeps_all = rows_R is None or not self.stage.is_last
        begun, num_whole = 0, len(self._layers) - (not keeps_all)
        for layer in [layer for layer in self.stage.layers if layer in taps] if taps else []:
            tapped = layer - self.stage.layers.start
            h_TD = run_layers(self._layers[begun:tapped], h_TD, attention, after_layer)
            taps[layer](h_TD)
            begun = tapped
        h_TD = run_layers(self._layers[begun:num_whole], h_TD, attention, after_layer)
        if not keeps_all:
            assert rows_R is not None, "some rows are kept"
            self._handed.keep_rows(rows_R)
            h_TD = self._layers[-1](h_TD, attention, rows_R)
        self._handed.clear()
        if not self.stage.is_last:
            return h_TD
        h_TD, num_layers = self._ended(h_TD), self.stage.layers.stop
        if num_layers in taps:
            taps[num_layers](h_TD)
        h_TD = self._final_norm(h_TD)
        if num_layers + 1 in taps:
            taps[num_layers + 1](h_TD)
        return h_TD

    @classmethod
    def layer_class(cls, spec: ModelSpec) -> type[Layer]:
        """Return the class of a model's layers."""
        return layer_class(spec)

    def _begun(self, inputs: Tensor) -> Tensor:
        """Return the input of the first layer for what `forward` gets."""
        h_TD = self.embed(inputs) if inputs.dim() == 1 else inputs
        if self._layer_inputs is not None:
            self._handed.begin(self._layer_inputs(inputs, h_TD))
        return h_TD

    def _ended(self, h_TD: Tensor) -> Tensor:
        """Return the input of the last norm for the output of the last layer."""
        return h_TD

    @property
    def can_record_layers(self) -> bool:
        # what the class of a plugin computes may differ from step to step
        return type(self).forward is Decoder.forward

    @property
    def vocabulary(self) -> Decoder:
        return self

    def parts(self) -> ProfiledParts:
        if self.stage.is_first:
            yield self, {"embed": "embed_tokens"}
        if self.stage.is_last:
            yield self, {"_final_norm": "norm"} | ({"_lm_head": "lm_head"} if self._has_head else {})
        for layer in self._layers:
            yield layer.mixer, layer.mixer.parts
            yield layer, layer.parts

    def dense_tensors(self) -> Iterator[Tensor]:
        # layer by layer, because most weights are copies
        outer = self.outer_weights()
        yield from dense_tensors(outer)
        for index in range(len(self._layers)):
            yield from dense_tensors(DecoderWeights(None, None, self._vocab_start, None, [self.layer_weights(index)]))

    def outer_weights(self) -> DecoderWeights:
        """Return the weights of the stage that aren't those of a layer. Its `layers` are empty."""
        embed_VD = self._embed_VD.weight if isinstance(self._embed_VD, IntegerEmbedding) else self._embed_VD
        head_VD = None
        if self._has_head:
            head_VD = embed_VD if self._is_tied else self._lm_head.weight
        assert not isinstance(head_VD, Fp8Weight | IntegerParts), "a head is a tensor or has integers of one form"
        return DecoderWeights(
            embed_VD=embed_VD,
            lm_head_VD=head_VD,
            vocab_start=self._vocab_start,
            final_norm_D=self._final_norm_D if self.stage.is_last else None,
            layers=[],
            head_bias_V=self._head_bias_V,
            layer_inputs=None if self._layer_inputs is None else self._layer_inputs.weights(),
        )

    def layer_weights(self, index: int) -> LayerWeights:
        """Return the weights that a layer of the stage was made of, without those of experts. Most are copies."""
        return self._layers[index].weights()

    @property
    def weight_parts(self) -> WeightParts:
        outside = {name: getattr(self, attribute, None) for name, attribute in self._OUTSIDE_LAYERS.items()}
        return WeightParts(self._layers, {name: each for name, each in outside.items() if each is not None})

    def logits(self, hidden_RD: Tensor) -> Tensor:
        logits_RV = self._lm_head(hidden_RD)
        if self._head_bias_V is not None:
            logits_RV += self._head_bias_V
        logits_RV = self._ranks.all_gather_columns(logits_RV)
        if self._logits_multiplier != 1.0:
            logits_RV = logits_RV * self._logits_multiplier
        if self._logits_softcap is not None:
            # in float32, because near the cap, many logits would be the same number of 16 bits
            logits_RV = (logits_RV.float() / self._logits_softcap).tanh_().mul_(self._logits_softcap)
        return logits_RV[:, : self.vocab_size] if self._ranks.size > 1 else logits_RV

    def embed(self, token_ids_T: Tensor) -> Tensor:
        assert self._embed_VD is not None, "only the first stage has the embedding"
        h_TD = embed(self._embed_VD, self._vocab_start, token_ids_T, self._ranks)
        return h_TD if self._embedding_multiplier == 1.0 else h_TD.mul_(self._embedding_multiplier)


def _run_one_by_one(
    layers: Sequence[ComputeLayer], h_TD: Tensor, attention: Attention, after_layer: Callable[[], None]
) -> Tensor:
    for layer in layers:
        h_TD = layer(h_TD, attention)
        after_layer()
    return h_TD


def embed(embed_VD: Tensor | IntegerEmbedding, vocab_start: int, token_ids_T: Tensor, ranks: TensorParallel) -> Tensor:
    """Return the tokens' embeddings [T, D] from this rank's rows of the embedding, which begin at `vocab_start`."""
    if ranks.size == 1:
        return embed_VD.index_select(0, token_ids_T)
    local_T = token_ids_T - vocab_start
    is_ours_T = (local_T >= 0) & (local_T < len(embed_VD))
    h_TD = embed_VD.index_select(0, local_T * is_ours_T)
    return ranks.all_reduce_(h_TD * is_ours_T.unsqueeze(1))


class Layer:
    """One decoder layer on one rank."""

    _PARTS: ClassVar[Mapping[str, str]] = {
        "input_norm": "input_layernorm",
        "_after_attention": "after_attention_layernorm",
        "_post_norm": "post_attention_layernorm",
        "feed_forward": "mlp",
        "_after_feed_forward": "after_feedforward_layernorm",
    }

    def __init__(
        self,
        stage_index: int,
        index: int,
        spec: ModelSpec,
        weights: LayerWeights,
        ranks: TensorParallel,
        experts: ExpertRanks,
        operations: Operations,
        adapters: Adapters | None = None,
        handed: Handed | None = None,
    ) -> None:
        """
        Args:
            stage_index: the layer's index among those of the stage.
            index: the layer's index among those of the model.
            adapters: see `Decoder`.
            handed: what the layers of the network hand to later ones. None: nothing.
        """
        self._stage_index = stage_index
        self._residual_multiplier = spec.residual_multiplier
        self._norms = {name: getattr(weights, name) for name in _NORMS}
        self.input_norm = make_norm(weights.before_attention_D, spec, operations)
        self._after_attention = make_norm(weights.after_attention_D, spec, operations)
        self._post_norm = make_norm(weights.before_feed_forward_D, spec, operations)
        self._after_feed_forward = make_norm(weights.after_feed_forward_D, spec, operations)
        adapt: Adapt = (
            unadapted
            if adapters is None
            else lambda linear, name, ranks: adapters.around(linear, (stage_index, name), ranks)
        )
        place = PartPlace(spec, index, stage_index, ranks, experts, operations, adapt, handed or Handed())
        self.mixer: Mixer = place.make(spec.mixers[index], weights.mixer)
        self.feed_forward: FeedForward = place.make(spec.feed_forwards[index], weights.feed_forward)

    @property
    def parts(self) -> Mapping[str, str]:
        """The names of the layer's parts in profiles, by attribute."""
        return {name: part for name, part in self._PARTS.items() if getattr(self, name) is not None}

    def __call__(self, h_TD: Tensor, attention: Attention, rows_R: Tensor | None = None) -> Tensor:
        """Return the layer's output for hidden states, or only for their rows `rows_R`. Overwrites `h_TD`."""
        out_TO = self.mixer(h_TD if self.input_norm is None else self.input_norm(h_TD), attention)
        if rows_R is not None:
            h_TD, out_TO = h_TD.index_select(0, rows_R), out_TO.index_select(0, rows_R)
        return self.finish(h_TD, out_TO)

    def mix(self, h_TD: Tensor, attention: Attention) -> Tensor:
        """Return what the layer's mixer makes of hidden states, before its output projection."""
        return self.mixer(h_TD if self.input_norm is None else self.input_norm(h_TD), attention)

    def finish(self, h_TD: Tensor, out_TO: Tensor) -> Tensor:
        """Return the layer's output for hidden states and the result of attention. Overwrites `h_TD`."""
        if self._after_attention is None and self._residual_multiplier == 1.0:
            h_TD = self.mixer.o.add_to(h_TD, out_TO)
        else:
            h_TD = self._add(h_TD, self.mixer.o(out_TO), self._after_attention)
        x_TD = h_TD if self._post_norm is None else self._post_norm(h_TD)
        if self._after_feed_forward is None and self._residual_multiplier == 1.0:
            return self.feed_forward.add_to(h_TD, x_TD)
        return self._add(h_TD, self.feed_forward.apply(x_TD), self._after_feed_forward)

    def _add(self, h_TD: Tensor, out_TD: Tensor, norm: Norm | None) -> Tensor:
        """Add a block's result to hidden states, normalized and multiplied."""
        return h_TD.add_(out_TD if norm is None else norm(out_TD), alpha=self._residual_multiplier)

    def weights(self) -> LayerWeights:
        """Return the weights that the layer was made of, without those of experts."""
        return LayerWeights(mixer=self.mixer.weights(), feed_forward=self.feed_forward.weights(), **self._norms)


class ParallelLayer(Layer):
    """A layer whose mixer and feed-forward part read the same hidden states, which both add to."""

    def finish(self, h_TD: Tensor, out_TO: Tensor) -> Tensor:
        """Return the layer's output for hidden states and the result of attention. Overwrites `h_TD`."""
        assert self._post_norm is not None, "such layers have norms before their blocks"
        x_TD = self._post_norm(h_TD)
        return self.feed_forward.add_to(self.mixer.o.add_to(h_TD, out_TO), x_TD)


class NormedLayer(Layer):
    """A layer whose blocks add to what they have read, as `Parts.sums` says. It has a norm before each block alone."""

    def __init__(self, stage_index: int, index: int, spec: ModelSpec, *parts: Any) -> None:
        super().__init__(stage_index, index, spec, *parts)
        self._sums = spec.sums[index]

    def __call__(self, h_TD: Tensor, attention: Attention, rows_R: Tensor | None = None) -> Tensor:
        assert self.input_norm is not None, "such layers have norms before their blocks"
        x_TD = self.input_norm(h_TD)
        out_TO = self.mixer(x_TD, attention)
        if rows_R is not None:
            x_TD, out_TO = x_TD.index_select(0, rows_R), out_TO.index_select(0, rows_R)
        return self.finish(x_TD, out_TO)

    def finish(self, h_TD: Tensor, out_TO: Tensor) -> Tensor:
        """Return the layer's output for the mixer's input and its result. Overwrites `h_TD`."""
        assert self._post_norm is not None, "such layers have norms before their blocks"
        h_TD = _sum(h_TD, self.mixer.o(out_TO), self._sums.mixer)
        x_TD = self._post_norm(h_TD)
        return _sum(x_TD, self.feed_forward.apply(x_TD), self._sums.feed_forward)


def layer_class(spec: ModelSpec) -> type[Layer]:
    """Return the class of a model's layers."""
    if spec.sums:
        return NormedLayer
    return ParallelLayer if spec.is_parallel else Layer


def _sum(x_TD: Tensor, out_TD: Tensor, factors: BlockSum) -> Tensor:
    return x_TD.mul_(factors.kept).add_(out_TD, alpha=factors.added)


def make_norm(weight_D: Tensor | None, spec: ModelSpec, operations: Operations) -> Norm | None:
    """Return the norm with these weights. None: there is no such norm."""
    return None if weight_D is None else _norm(weight_D, spec, operations)


def _norm(norm_XD: Tensor, spec: ModelSpec, operations: Operations) -> Norm:
    """Return the norm with this weight, [D], [2, D] with a bias, or [0, D] without either."""
    if spec.norm == "rms":
        return operations.rms_norm(norm_XD, spec.rms_norm_eps, spec.norm_offset)
    # copies, because weights that are replaced or moved are tensors of their own
    rows = [row_D.clone() for row_D in norm_XD.view(-1, spec.hidden_size)] or [norm_XD.new_ones(spec.hidden_size)]
    if spec.norm_offset:
        rows[0] += spec.norm_offset
    return operations.layer_norm(rows[0], rows[1] if len(rows) > 1 else None, spec.rms_norm_eps)


def _dtype_of(weights: DecoderWeights) -> torch.dtype:
    """Return the dtype of the weights that aren't quantized."""
    norms = [getattr(layer, name) for layer in weights.layers[:1] for name in _NORMS]
    found = [*norms, weights.final_norm_D, weights.embed_VD, weights.lm_head_VD]
    return next(each.dtype for each in found if isinstance(each, Tensor))


def num_weights(spec: ModelSpec, layer: LayerWeights) -> int:
    """Return the number of multiplications for one token in a layer, without those of attention."""
    return layer.mixer.num_weights(spec) + layer.feed_forward.num_weights(spec)
