"""The weights of a decoder one after the other, with names."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from raycore.weights.loader import DecoderWeights, LayerWeights
from raycore.weights.weight import Weight


def named_weights(weights: DecoderWeights, first_layer: int = 0) -> Iterator[tuple[str, Weight]]:
    """The weights of a stage by name. A fused weight has the name of the fused layer.

    `first_layer`: the index in the model of the stage's first layer.
    """
    if weights.embed_VD is not None:
        yield "model.embed_tokens.weight", weights.embed_VD
    if weights.lm_head_VD is not None and weights.lm_head_VD is not weights.embed_VD:
        yield "lm_head.weight", weights.lm_head_VD
    if weights.head_bias_V is not None:
        yield "lm_head.bias", weights.head_bias_V
    if weights.final_norm_D is not None:
        yield "model.norm.weight", weights.final_norm_D
    for name, weight in () if weights.layer_inputs is None else weights.layer_inputs.named():
        if weight is not None:
            yield f"model.{name}", weight
    for key, weight in (weights.vision or {}).items():
        yield f"vision.{key}", weight
    for index, layer in enumerate(weights.layers, start=first_layer):
        for name, weight in _of_layer(layer):
            if weight is not None:
                yield f"model.layers.{index}.{name}", weight


def dense_tensors(weights: DecoderWeights) -> Iterator[Tensor]:
    """All weights but those of experts, in a fixed order. They may not be in fp8."""
    for name, weight in named_weights(weights):
        if ".experts." not in name:
            assert isinstance(weight, Tensor), "ranks that exchange weights have converted them"
            yield weight


def _of_layer(layer: LayerWeights) -> Iterator[tuple[str, Weight | None]]:
    yield "input_layernorm.weight", layer.before_attention_D
    yield from layer.mixer.named()
    yield "after_attention_layernorm.weight", layer.after_attention_D
    yield "post_attention_layernorm.weight", layer.before_feed_forward_D
    yield "after_feedforward_layernorm.weight", layer.after_feed_forward_D
    yield from layer.feed_forward.named()
