"""A decoder, made of the parts that its family has.

This module decides the order of a layer's operations; the operations are in `operations`, `attention` and
`feed_forward`. Names of tensors end in their shapes: T tokens of the step, R those of the T rows that are kept, D
hidden size, O fused query, key and value rows, N heads, H elements of a head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from raycore.attention.spec import Attention
from raycore.checkpoint.stages import Stage
from raycore.decoder.attention_mixer import qk_norm, reorder_heads_
from raycore.decoder.latent_mixer import latent_norm, reorder_last_
from raycore.decoder.mixer import Mixer
from raycore.decoder.mixers import make_mixer, state_constants
from raycore.layers.feed_forward import DenseFeedForward, FeedForward, SparseFeedForward
from raycore.layers.integer_linear import IntegerEmbedding, IntegerLinear
from raycore.layers.linear import Linear
from raycore.layers.lora import Adapters, FusedName
from raycore.layers.operations import Norm, Operations
from raycore.layers.rope import PairOrder
from raycore.models.spec import ModelSpec
from raycore.parallel.experts import ExpertRanks, SplitExperts
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.profile_session import Parts
from raycore.weights.fp8_weight import Fp8Weight
from raycore.weights.integer_parts import IntegerParts
from raycore.weights.integer_weight import IntegerWeight
from raycore.weights.latent_weights import LatentWeights
from raycore.weights.loader import AttentionWeights, DecoderWeights, LayerWeights, MlpWeights
from raycore.weights.lora_weights import LoraWeights
from raycore.weights.moe_weights import ExpertWeights, MoeWeights

Taps = Mapping[int, Callable[[Tensor], None]]
"""By layer of the model: what gets the layer's input, hidden states [T, D], which it must copy, or change in place."""
NO_TAPS: Taps = {}
RunLayer = Callable[["Layer", Tensor, Attention], Tensor]
"""Computes a layer all of whose rows are kept. May overwrite the hidden states [T, D] that it gets."""
_NORMS = (
    "before_attention_D",
    "after_attention_D",
    "before_feed_forward_D",
    "after_feed_forward_D",
)
"""The fields of `LayerWeights` that are weights of norms."""


class Decoder:
    """One tensor-parallel rank's part of a model, or of one of its stages."""

    _OUTSIDE_LAYERS: ClassVar[tuple[str, ...]] = ("_embed_VD", "_lm_head", "_final_norm_D", "_final_norm")
    """Attributes that have weights."""

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
        self._moe = spec.moe
        self.stage = stage = stage or Stage.whole(spec)
        self.vocab_size = spec.vocab_size
        self.hidden_size = spec.hidden_size
        self.dtype = _dtype_of(weights)
        """Of hidden states."""
        embed_VD, lm_head_VD = weights.embed_VD, weights.lm_head_VD
        self._embed_VD = embed_VD.to(operations.device) if isinstance(embed_VD, Tensor) else None
        self._vocab_start = weights.vocab_start
        # as transformers multiplies: by a number of the hidden states' dtype
        self._embedding_multiplier = float(torch.tensor(spec.embedding_multiplier, dtype=self.dtype))
        self._logits_multiplier = spec.logits_multiplier
        self._logits_softcap = spec.logits_softcap
        self._has_head = lm_head_VD is not None
        self.num_weights = sum(num_weights(spec, layer) for layer in weights.layers)
        """Number of multiplications for one token, without those of attention."""
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
        num_attention_layers = sum(not spec.has_state(layer) for layer in stage.layers)
        self.num_key_value_numbers = num_attention_layers * _key_value_numbers(spec, ranks.size)
        """How many numbers one token's keys and values have in all layers of the stage."""
        self.qk_norms_NH: list[Tensor | None] = []
        """By layer of the stage: the weights of the norms of query and key heads, as `AttentionSpec` has them."""
        self.sinks_N: list[Tensor | None] = []
        """By layer of the stage, as `AttentionSpec` has them."""
        self.state_constants: list[dict[str, Tensor | None]] = []
        """By layer of the stage: what layers that keep a state compute with, by the names of the fields of their
        `DeltaLayer` or `Mamba2Layer`. Empty: the layer has attention."""
        self._layers: list[Layer] = []
        self.sparse_layers: list[SparseFeedForward] = []
        """The feed-forward parts that have experts, in the order of the layers."""
        experts = experts or SplitExperts(ranks)
        for stage_index, layer in enumerate(stage.layers):
            own = weights.layers.pop(0)
            self._add_constants(spec, layer, own, ranks.size)
            is_last = layer == spec.num_layers - 1
            made = Layer(stage_index, layer, spec, own, ranks, experts, operations, adapters, is_last=is_last)
            self._layers.append(made)
            if isinstance(made.feed_forward, SparseFeedForward):
                self.sparse_layers.append(made.feed_forward)

    def _add_constants(self, spec: ModelSpec, layer: int, own: LayerWeights, tp_size: int) -> None:
        """Note what a layer computes with besides its linear layers."""
        mixer, device = own.mixer, self._operations.device
        norm: Tensor | None = None
        sinks_N: Tensor | None = None
        constants: Mapping[str, Tensor | None] = {}
        if isinstance(mixer, AttentionWeights):
            norm, sinks_N = qk_norm(spec, mixer, layer, tp_size, device), mixer.sinks_N
        elif isinstance(mixer, LatentWeights):
            norm = latent_norm(mixer, device)
        else:
            constants = state_constants(mixer, device)
        self.qk_norms_NH.append(norm)
        self.sinks_N.append(None if sinks_N is None else sinks_N.to(device))
        self.state_constants.append(constants)

    def forward(
        self,
        inputs: Tensor,
        attention: Attention,
        rows_R: Tensor | None = None,
        after_layer: Callable[[], None] = lambda: None,
        taps: Taps = NO_TAPS,
        run_layer: RunLayer | None = None,
    ) -> Tensor:
        """Run the layers of the stage.

        Args:
            inputs: in the first stage, the tokens [T], or their embeddings [T, D]; in others, the hidden states [T, D]
                that the stage before has returned. Both may be overwritten.
            rows_R: in the last stage, the rows that are kept. None: all.
            taps: get the inputs of some layers, and may change them.
            run_layer: computes layers. None: they do it themselves.

        Returns: in the last stage, the final hidden states [R, D]; in others, those [T, D] for the next stage.
        """
        h_TD = self.embed(inputs) if inputs.dim() == 1 else inputs
        run_layer = run_layer or Layer.__call__
        last = self._layers[-1]
        keeps_all = rows_R is None or not self.stage.is_last
        for index, layer in zip(self.stage.layers, self._layers, strict=True):
            if index in taps:
                taps[index](h_TD)
            if layer is not last or keeps_all:
                h_TD = run_layer(layer, h_TD, attention)
            else:
                h_TD = layer(h_TD, attention, rows_R)
            if layer is not last:
                after_layer()
        return self._final_norm(h_TD) if self.stage.is_last else h_TD

    def around(self, attention: Attention) -> Attention:
        """Return the attention that a runner tells of its steps, around the one that computes them."""
        return attention

    def parts(self) -> Parts:
        """The parts of a step, for profiles. Attention is not among them."""
        if self.stage.is_first:
            yield self, {"embed": "embed_tokens"}
        if self.stage.is_last:
            yield self, {"_final_norm": "norm"} | ({"_lm_head": "lm_head"} if self._has_head else {})
        for layer in self._layers:
            yield layer.mixer, layer.mixer.parts
            yield layer, layer.parts

    def check_tiles(self) -> bool:
        """For batch invariance: test whether a row's result has the same bits wherever in a tile the row is.

        If the test fails on any rank, rows are computed one at a time from now on. All ranks must call this at the same
        time.
        """
        num_failures = torch.tensor([float(not self._operations.check_tiles())], device=self._operations.device)
        is_kept = not self._ranks.all_reduce_(num_failures).item()
        if not is_kept:
            self._operations.compute_rows_alone()
        return is_kept

    def forward_nothing(self) -> None:
        """Take part in a step of the ranks that share experts, although this engine has no token in it."""
        for layer in self._layers:
            layer.feed_forward.forward_nothing()

    def share_experts(self, ranks: ExpertRanks | None, num_gained: int) -> None:
        """Share the experts with other ranks from now on. None: only the tensor-parallel ranks share them.

        `num_gained`: how many experts more than before this rank holds of each sparse layer. May be negative.
        """
        for layer in self.sparse_layers:
            layer.share_with(ranks or SplitExperts(self._ranks))
        assert self._moe is not None
        num_used = num_gained * self._moe.num_experts_per_tok / self._moe.num_experts
        expert_size = 3 * self.hidden_size * self._moe.intermediate_size
        self.num_weights += int(len(self.sparse_layers) * num_used * expert_size)

    def empty_expert(self) -> ExpertWeights:
        """Allocate the weights of an expert."""
        assert self._moe is not None
        size, hidden = self._moe.intermediate_size, self.hidden_size
        empty = partial(torch.empty, dtype=self.dtype, device=self._operations.device)
        biases = (empty(2 * size), empty(hidden)) if self._moe.has_bias else (None, None)
        return ExpertWeights(empty(2 * size, hidden), empty(hidden, size), *biases)

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
        )

    def layer_weights(self, index: int) -> LayerWeights:
        """Return the weights that a layer of the stage was made of, without those of experts. Most are copies."""
        return self._layers[index].weights()

    def parts_outside_layers(self) -> dict[str, object]:
        """What has weights besides the layers of the stage, by name."""
        found = {name: getattr(self, name, None) for name in self._OUTSIDE_LAYERS}
        return {name: each for name, each in found.items() if each is not None}

    def parts_of_layer(self, index: int) -> tuple[object, ...]:
        """All that has weights of a layer of the stage: the layer, and what attention gets."""
        return self._layers[index], self.qk_norms_NH[index], self.sinks_N[index], self.state_constants[index]

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Return the logits [R, V] of the whole vocabulary, in the last stage. All of its ranks return the same."""
        logits_RV = self._ranks.all_gather_columns(self._lm_head(hidden_RD))
        if self._logits_multiplier != 1.0:
            logits_RV = logits_RV * self._logits_multiplier
        if self._logits_softcap is not None:
            # in float32, because near the cap, many logits would be the same number of 16 bits
            logits_RV = (logits_RV.float() / self._logits_softcap).tanh_().mul_(self._logits_softcap)
        return logits_RV[:, : self.vocab_size] if self._ranks.size > 1 else logits_RV

    def embed(self, token_ids_T: Tensor) -> Tensor:
        """Return the tokens' embeddings [T, D], in the first stage."""
        assert self._embed_VD is not None, "only the first stage has the embedding"
        h_TD = embed(self._embed_VD, self._vocab_start, token_ids_T, self._ranks)
        return h_TD if self._embedding_multiplier == 1.0 else h_TD.mul_(self._embedding_multiplier)


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
        *,
        is_last: bool,
    ) -> None:
        """
        Args:
            stage_index: the layer's index among those of the stage.
            index: the layer's index among those of the model.
            adapters: see `Decoder`.
            is_last: whether it is the model's last layer.
        """
        self._stage_index = stage_index
        self._is_last = is_last
        self._residual_multiplier = spec.residual_multiplier
        self._norms = {name: getattr(weights, name) for name in _NORMS}
        self.input_norm = make_norm(weights.before_attention_D, spec, operations)
        self._after_attention = make_norm(weights.after_attention_D, spec, operations)
        self._post_norm = make_norm(weights.before_feed_forward_D, spec, operations)
        self._after_feed_forward = make_norm(weights.after_feed_forward_D, spec, operations)
        self._adapters = adapters
        self.mixer: Mixer = make_mixer(stage_index, index, spec, weights.mixer, ranks, operations, self._adapted)
        self.feed_forward = self._make_feed_forward(spec, weights, ranks, experts, operations)

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
        return LayerWeights(mixer=self.mixer.weights(), feed_forward=_dense_weights(self.feed_forward), **self._norms)

    def _make_feed_forward(
        self,
        spec: ModelSpec,
        weights: LayerWeights,
        ranks: TensorParallel,
        experts: ExpertRanks,
        operations: Operations,
    ) -> FeedForward:
        own = weights.feed_forward
        if isinstance(own, MlpWeights):
            around = None if self._adapters is None else partial(self._adapted, name="gate_up")
            gate_up = operations.gated_linear(own.gate_up_FD, own.gate_up_bias, around, spec.gate)
            down = self._adapted(operations.linear(own.down_DF, own.down_bias, ranks), "down", ranks)
            return DenseFeedForward(gate_up, down)
        assert spec.moe is not None
        return SparseFeedForward(spec.moe, own, experts, self._is_last, operations, ranks, spec.gate)

    def _adapted(self, linear: Linear, name: FusedName, ranks: TensorParallel | None = None) -> Linear:
        """Return a linear layer with what adapters add to it. `ranks`: those over which its input is split."""
        return linear if self._adapters is None else self._adapters.around(linear, (self._stage_index, name), ranks)


def _dense_weights(feed_forward: FeedForward) -> MlpWeights | MoeWeights:
    """Return the weights that a feed-forward part was made of, without those of experts."""
    if isinstance(feed_forward, SparseFeedForward):
        return feed_forward.dense_weights()
    assert isinstance(feed_forward, DenseFeedForward)
    gate_up, down = feed_forward.gate_up, feed_forward.down
    return MlpWeights(gate_up.weight, gate_up.bias, down.weight, down.bias)


def reorder_adapter_(adapter: LoraWeights, spec: ModelSpec, tp_size: int, first_layer: int = 0) -> None:
    """Bring what an adapter adds to queries and keys in the order in which layers have them. They share its memory.

    `first_layer`: the index in the model of the adapter's first layer.
    """
    if spec.latent is not None:
        _reorder_latent_adapter_(adapter, spec, tp_size, first_layer)
        return
    num_q, num_kv = spec.num_heads // tp_size * spec.query_rows, spec.kv_heads_per_rank(tp_size) * spec.head_dim
    every_second = [slice(0, None, 2)] if spec.has_attention_gate else [slice(None)]
    for index, layer in enumerate(adapter.layers, start=first_layer):
        order = PairOrder(spec.rotations[index], spec.head_dim)
        for part in () if layer.qkv is None else layer.qkv.parts:
            if part.first_output < num_q + num_kv:
                heads = every_second if part.first_output < num_q else [slice(None)]
                reorder_heads_(part.b_RO.t(), heads, spec.head_dim, order.pairs)


def _reorder_latent_adapter_(adapter: LoraWeights, spec: ModelSpec, tp_size: int, first_layer: int) -> None:
    """The same for latent attention."""
    heads, num_heads = spec.latent, spec.num_heads // tp_size
    assert heads is not None, "the model has latent attention"
    for index, layer in enumerate(adapter.layers, start=first_layer):
        pairs = PairOrder(spec.rotations[index], heads.rotated_dim).pairs
        for part in () if layer.qkv is None else layer.qkv.parts:
            is_key = part.first_output > 0
            if is_key or heads.query_rank is None:
                reorder_last_(part.b_RO.t(), 1 if is_key else num_heads, heads.rotated_dim, pairs)
        for part in () if layer.q_b is None else layer.q_b.parts:
            reorder_last_(part.b_RO.t(), num_heads, heads.rotated_dim, pairs)


def make_norm(weight_D: Tensor | None, spec: ModelSpec, operations: Operations) -> Norm | None:
    """Return the norm with these weights. None: there is no such norm."""
    return None if weight_D is None else _norm(weight_D, spec, operations)


def _norm(weight_D: Tensor, spec: ModelSpec, operations: Operations) -> Norm:
    return operations.rms_norm(weight_D, spec.rms_norm_eps, spec.norm_offset)


def _dtype_of(weights: DecoderWeights) -> torch.dtype:
    """Return the dtype of the weights that aren't quantized."""
    norms = [getattr(layer, name) for layer in weights.layers[:1] for name in _NORMS]
    found = [*norms, weights.final_norm_D, weights.embed_VD, weights.lm_head_VD]
    return next(each.dtype for each in found if isinstance(each, Tensor))


def _key_value_numbers(spec: ModelSpec, tp_size: int) -> int:
    """Return how many numbers one token's keys and values have in one layer."""
    if spec.latent is not None:
        return spec.latent.width
    return 2 * spec.kv_heads_per_rank(tp_size) * spec.head_dim


def num_weights(spec: ModelSpec, layer: LayerWeights) -> int:
    """Return the number of multiplications for one token in a layer, without those of attention."""
    own, total = layer.feed_forward, layer.mixer.num_weights
    if isinstance(own, MlpWeights):
        return total + own.gate_up_FD.numel() + own.down_DF.numel()
    assert spec.moe is not None
    share_used = spec.moe.num_experts_per_tok / spec.moe.num_experts
    total += own.router_ED.numel()
    if own.shared is not None:
        total += own.shared.gate_up_FD.numel() + own.shared.down_DF.numel()
    return total + int(share_used * (own.gate_up_EFD.numel() + own.down_EDF.numel()))
