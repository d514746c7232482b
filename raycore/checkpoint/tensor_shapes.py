"""The names and shapes of a whole model's tensors in a checkpoint. Does not import torch.

Parts of layers declare their own (`raycore.models.layer_part`). `raycore.weights` fills a rank's part of each tensor.
"""

from __future__ import annotations

__all__ = ["eagle3_tensors", "layer_prefix", "model_tensors", "mtp_tensors", "part_tensors"]

from collections.abc import Callable, Iterator

from raycore.models.layer_part import LayerPart
from raycore.models.spec import ModelSpec
from raycore.parts.drafts.checkpoint.eagle3 import Eagle3Spec
from raycore.parts.drafts.checkpoint.mtp import MtpSpec
from raycore.parts.images.checkpoint.vision_tensors import vision_tensors

Shapes = Iterator[tuple[str, tuple[int, ...]]]
"""Names and shapes of tensors."""

_LAYER_PREFIXES = ("midlayer.", "layers.0.")
"""Where checkpoints of EAGLE-3 heads have the layer's tensors."""


def model_tensors(spec: ModelSpec, has_tensor: Callable[[str], bool]) -> Shapes:
    """Yield the tensors of a whole model, quantized weights as if they weren't quantized.

    `has_tensor`: whether the checkpoint has a tensor, which says how experts are stored.
    """
    if not spec.encodes_only:
        yield spec.names.embedding, (spec.vocab_size, spec.hidden_size)
        yield from _norm(spec, spec.names.final_norm)
    if spec.layer_inputs is not None:
        yield from part_tensors(spec, spec.layer_inputs, spec.names.roots.model)
    if spec.has_head or (spec.pooling is not None and spec.pooling.uses_head_rows):
        yield spec.names.head, (spec.vocab_size, spec.hidden_size)
    if spec.has_head_bias:
        yield spec.names.head_bias, (spec.vocab_size,)
    if spec.pooling is not None:
        yield from spec.pooling.own_tensors().items()
    if spec.vision is not None:
        yield from ((each.name, each.shape) for each in vision_tensors(spec.vision))
    for layer in range(spec.num_layers):
        prefix = spec.names.layer(layer)
        yield from _norms(spec, layer, prefix)
        yield from part_tensors(spec, spec.mixers[layer], prefix)
        yield from part_tensors(spec, spec.feed_forwards[layer].stored(spec, has_tensor), prefix)


def eagle3_tensors(spec: ModelSpec, head: Eagle3Spec, has_tensor: Callable[[str], bool], prefix: str) -> Shapes:
    """Yield the tensors of an EAGLE-3 head, the optional ones only if the checkpoint has them.

    `prefix`: how the names of its layer's tensors begin.
    """
    hidden = spec.hidden_size
    if has_tensor("embed_tokens.weight"):
        yield "embed_tokens.weight", (spec.vocab_size, hidden)
    yield "fc.weight", (hidden, head.target_hidden_size * len(head.target_layers))
    yield f"{prefix}hidden_norm.weight", (hidden,)
    yield from _norms(spec, 0, prefix)
    yield from part_tensors(spec, spec.mixers[0], prefix, 2 * hidden)
    yield from part_tensors(spec, spec.feed_forwards[0], prefix)
    yield "norm.weight", (hidden,)
    yield "lm_head.weight", (head.draft_vocab_size, hidden)
    if has_tensor("d2t"):
        yield "d2t", (head.draft_vocab_size,)


def mtp_tensors(spec: ModelSpec, head: MtpSpec, has_tensor: Callable[[str], bool]) -> Shapes:
    """Yield the tensors of a head in its target's checkpoint. `spec`: of the head's layers."""
    hidden = spec.hidden_size
    for index in range(spec.num_layers):
        names = head.tensors(spec, has_tensor, index)
        yield f"{names.projection}.weight", (hidden, 2 * hidden)
        for norm in (names.embedding_norm, names.hidden_norm, names.final_norm):
            yield from _norm(spec, norm)
        yield from _norms(spec, index, names.layer)
        yield from part_tensors(spec, spec.mixers[index], names.layer)
        feed_forward = spec.feed_forwards[index].stored(spec, head.has_tensor(spec, has_tensor))
        yield from part_tensors(spec, feed_forward, names.layer)


def layer_prefix(has_tensor: Callable[[str], bool] = lambda name: False) -> str:
    """Return how the names of the tensors of an EAGLE-3 head's layer begin."""
    return next((each for each in _LAYER_PREFIXES if has_tensor(f"{each}hidden_norm.weight")), _LAYER_PREFIXES[0])


def _norms(spec: ModelSpec, layer: int, prefix: str) -> Shapes:
    for name in spec.norms(layer).given:
        yield from _norm(spec, f"{prefix}{name}")


def _norm(spec: ModelSpec, name: str) -> Shapes:
    for tensor in spec.norm_tensors(name):
        yield tensor, (spec.hidden_size,)


def part_tensors(spec: ModelSpec, part: LayerPart, prefix: str, num_inputs: int | None = None) -> Shapes:
    """Yield the tensors of a part of a layer. `num_inputs`: see `LayerPart.linears`."""
    for name, shape in part.tensors(spec, num_inputs).items():
        yield f"{prefix}{name}", shape
