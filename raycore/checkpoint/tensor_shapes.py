"""The names and shapes of a whole model's tensors in a checkpoint. Does not import torch.

What mixes tokens declares its own (`raycore.models.mixers`). `raycore.weights` fills a rank's part of each tensor.
"""

from __future__ import annotations

__all__ = ["eagle3_tensors", "layer_prefix", "model_tensors"]

from collections.abc import Callable, Iterator

from raycore.models.linears import dense_linears
from raycore.models.quantization import MXFP4_GROUP
from raycore.models.spec import ModelSpec
from raycore.parts.drafts.checkpoint import Eagle3Spec
from raycore.parts.experts.models import MXFP4_NUMBERS, MXFP4_SCALES, ExpertNames, MoeSpec, has_stacked_experts
from raycore.parts.images.checkpoint.vision_tensors import vision_tensors

Shapes = Iterator[tuple[str, tuple[int, ...]]]
"""Names and shapes of tensors."""

_LAYER_PREFIXES = ("midlayer.", "layers.0.")
"""Where checkpoints of EAGLE-3 heads have the layer's tensors."""


def model_tensors(spec: ModelSpec, has_tensor: Callable[[str], bool]) -> Shapes:
    """Yield the tensors of a whole model, quantized weights as if they weren't quantized.

    `has_tensor`: whether the checkpoint has a tensor, which says how experts are stored.
    """
    yield spec.names.embedding, (spec.vocab_size, spec.hidden_size)
    yield spec.names.final_norm, (spec.hidden_size,)
    if spec.has_head or (spec.pooling is not None and spec.pooling.uses_head_rows):
        yield spec.names.head, (spec.vocab_size, spec.hidden_size)
    if spec.pooling is not None:
        yield from spec.pooling.own_tensors().items()
    if spec.vision is not None:
        yield from ((each.name, each.shape) for each in vision_tensors(spec.vision))
    for layer in range(spec.num_layers):
        prefix = spec.names.layer(layer)
        yield from _norms(spec, prefix)
        yield from mixer_tensors(spec, layer, prefix)
        if spec.moe is not None and spec.moe.sparse_layers[layer]:
            yield from _expert_tensors(spec, spec.moe, prefix, has_tensor)
        else:
            yield from dense_tensors(spec, prefix)


def eagle3_tensors(spec: ModelSpec, head: Eagle3Spec, has_tensor: Callable[[str], bool], prefix: str) -> Shapes:
    """Yield the tensors of an EAGLE-3 head, the optional ones only if the checkpoint has them.

    `prefix`: how the names of its layer's tensors begin.
    """
    hidden = spec.hidden_size
    if has_tensor("embed_tokens.weight"):
        yield "embed_tokens.weight", (spec.vocab_size, hidden)
    yield "fc.weight", (hidden, head.target_hidden_size * len(head.target_layers))
    yield f"{prefix}hidden_norm.weight", (hidden,)
    for name in spec.names.norms:
        yield f"{prefix}{name}.weight", (hidden,)
    yield from mixer_tensors(spec, 0, prefix, 2 * hidden)
    yield from dense_tensors(spec, prefix)
    yield "norm.weight", (hidden,)
    yield "lm_head.weight", (head.draft_vocab_size, hidden)
    if has_tensor("d2t"):
        yield "d2t", (head.draft_vocab_size,)


def layer_prefix(has_tensor: Callable[[str], bool] = lambda name: False) -> str:
    """Return how the names of the tensors of an EAGLE-3 head's layer begin."""
    return next((each for each in _LAYER_PREFIXES if has_tensor(f"{each}hidden_norm.weight")), _LAYER_PREFIXES[0])


def _norms(spec: ModelSpec, prefix: str) -> Shapes:
    for name in spec.names.norms:
        yield f"{prefix}{name}.weight", (spec.hidden_size,)


def mixer_tensors(spec: ModelSpec, layer: int, prefix: str, num_inputs: int | None = None) -> Shapes:
    """Yield the tensors of what mixes tokens in a layer. `num_inputs`: see `MixerSpec.linears`."""
    for name, shape in spec.mixers[layer].tensors(spec, num_inputs).items():
        yield f"{prefix}{name}", shape


def dense_tensors(spec: ModelSpec, prefix: str) -> Shapes:
    """Yield the tensors of a layer's dense feed-forward part."""
    for linear in dense_linears(spec):
        for name, shape in linear.tensors():
            yield f"{prefix}{name}", shape


def _expert_tensors(spec: ModelSpec, moe: MoeSpec, prefix: str, has_tensor: Callable[[str], bool]) -> Shapes:
    names, num, size, hidden = moe.names, moe.num_experts, moe.intermediate_size, spec.hidden_size
    is_stacked = has_stacked_experts(moe, spec.names.layers, has_tensor)
    block = f"{prefix}{'mlp' if is_stacked else names.block}."
    yield f"{block}{names.router}.weight", (num, hidden)
    if moe.router.has_bias:
        yield f"{block}{names.router}.bias", (num,)
    if moe.router.has_correction:
        yield f"{block}{names.correction}", (num,)
    if moe.shared is not None:
        # whatever the projections of experts are called
        yield from _network(f"{block}{names.shared}.", ExpertNames(), moe.shared.intermediate_size, hidden)
        if moe.shared.has_gate:
            yield f"{block}{names.shared_gate}.weight", (1, hidden)
    if is_stacked:
        yield from _stacked_experts(f"{block}experts.", moe, hidden, has_tensor)
        return
    for expert in range(num):
        yield from _network(f"{block}experts.{expert}.", names, size, hidden, has_bias=moe.has_bias)


def _stacked_experts(prefix: str, moe: MoeSpec, hidden: int, has_tensor: Callable[[str], bool]) -> Shapes:
    size = moe.intermediate_size
    for name, shape in (("gate_up_proj", (2 * size, hidden)), ("down_proj", (hidden, size))):
        if has_tensor(f"{prefix}{name}{MXFP4_NUMBERS}"):
            groups = moe.num_experts, shape[0], shape[1] // MXFP4_GROUP
            yield f"{prefix}{name}{MXFP4_NUMBERS}", (*groups, MXFP4_GROUP // 2)
            yield f"{prefix}{name}{MXFP4_SCALES}", groups
        else:
            yield f"{prefix}{name}", (moe.num_experts, *(reversed(shape) if moe.is_interleaved else shape))
        if moe.has_bias:
            yield f"{prefix}{name}_bias", (moe.num_experts, shape[0])


def _network(prefix: str, names: ExpertNames, size: int, hidden: int, *, has_bias: bool = False) -> Shapes:
    for name, shape in ((names.gate, (size, hidden)), (names.up, (size, hidden)), (names.down, (hidden, size))):
        yield f"{prefix}{name}.weight", shape
        if has_bias:
            yield f"{prefix}{name}.bias", shape[:1]
