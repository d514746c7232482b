"""The names and shapes of an encoder's tensors in a checkpoint. Does not import torch."""

from __future__ import annotations

__all__ = ["encoder_tensors", "with_norm_names"]

from collections.abc import Callable

from msgspec.structs import replace

from raycore.checkpoint.tensor_shapes import Shapes, part_tensors
from raycore.models.spec import ModelSpec


def encoder_tensors(spec: ModelSpec) -> Shapes:
    """Yield the tensors of an encoder, without those of heads above it."""
    encoder, root, hidden = spec.encoder, spec.names.roots.model, spec.hidden_size
    assert encoder is not None, "it is an encoder"
    names = encoder.names
    yield spec.names.embedding, (spec.vocab_size, hidden)
    if encoder.num_positions:
        yield f"{root}{names.positions}.weight", (encoder.num_positions, hidden)
    if encoder.num_token_types:
        yield f"{root}{names.token_types}.weight", (encoder.num_token_types, hidden)
    yield from _norm(spec, f"{root}{names.embedding_norm}")
    for layer in range(spec.num_layers):
        prefix = spec.names.layer(layer)
        yield from part_tensors(spec, spec.mixers[layer], prefix)
        if encoder.has_attention_norm(layer):
            yield from _norm(spec, f"{prefix}{names.attention_norm}")
        yield from part_tensors(spec, spec.feed_forwards[layer], prefix)
        yield from _norm(spec, f"{prefix}{names.feed_forward_norm}")
    if names.final_norm is not None:
        yield from _norm(spec, f"{root}{names.final_norm}")


def with_norm_names(spec: ModelSpec, has_tensor: Callable[[str], bool]) -> ModelSpec:
    """Return the description with the names of norms' weights that the files have: those of early BERTs differ."""
    encoder = spec.encoder
    assert encoder is not None, "it is an encoder"
    norm = f"{spec.names.roots.model}{encoder.names.embedding_norm}"
    is_early = has_tensor(f"{norm}.gamma") and not has_tensor(f"{norm}.weight")
    if not is_early:
        return spec
    names = replace(encoder.names, norm_weight="gamma", norm_bias="beta")
    return replace(spec, encoder=replace(encoder, names=names))


def _norm(spec: ModelSpec, name: str) -> Shapes:
    assert spec.encoder is not None, "it is an encoder"
    yield f"{name}.{spec.encoder.names.norm_weight}", (spec.hidden_size,)
    if spec.encoder.has_norm_bias:
        yield f"{name}.{spec.encoder.names.norm_bias}", (spec.hidden_size,)
