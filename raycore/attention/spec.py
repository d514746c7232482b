"""The interface of attention backends, and what they all know of the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

from raycore.layers.linear import Linear
from raycore.layers.rope import Rope
from raycore.models.mixers.spec import HeadShape
from raycore.models.spec import ModelSpec, QueryScale
from raycore.step.batch import StepInputs
from raycore.step.device_batch import StepTensors

_MadeT = TypeVar("_MadeT")


class Attention(Protocol):
    """Attention of a step's tokens to the keys and values of their own requests, which are in a paged cache."""

    def begin(self, step: StepInputs, tensors: StepTensors) -> None:
        """Prepare for the layers of `step`, whose inputs on the device are `tensors`."""
        ...

    def __call__(self, layer: int, qkv_TO: Tensor, /) -> Tensor:
        """Compute attention in one layer. Returns [T, query heads · H].

        First normalizes, if the model does, and rotates queries and keys, in place, and stores keys and values.

        With latent attention, `qkv_TO` has a token's query heads, brought to the space of latents, and its key. Of
        both, the last elements are rotated, and the others of the key, the latent, are normalized. Returns
        [T, query heads · size of a latent]. Where tokens are selected, `qkv_TO` has more behind these, in layers that
        select some: what the queries of `AttentionSpec.index_queries` are made of, a key, and the weight of each query.
        """
        ...


class NoAttention:
    """Attention where there are no layers. Implements `Attention`."""

    def begin(self, step: StepInputs, tensors: StepTensors) -> None:
        """There is nothing to prepare."""

    def __call__(self, layer: int, qkv_TO: Tensor, /) -> NoReturn:
        """Nobody calls it."""
        raise AssertionError("there are no layers")


class MixerConstants(NamedTuple):
    """What a layer's `Attention` computes with, besides what the mixer hands it in each step."""

    qk_norm_NH: Tensor | None = None
    """As `AttentionSpec.qk_norms_NH` has it."""
    sinks_N: Tensor | None = None
    """As `AttentionSpec.sinks_N` has it."""
    index_queries: Linear | None = None
    """As `AttentionSpec.index_queries` has it."""
    of_state: Mapping[str, Any] = {}
    """By the names of the fields of what the kernels of states know of a layer: tensors, None, or what the kernels
    call."""


class WeightCopies:
    """What attention has made of weights, and how. It is made again when the weights have changed."""

    def __init__(self) -> None:
        self._made: list[tuple[object, Callable[[], object]]] = []

    def __call__(self, make: Callable[[], _MadeT]) -> _MadeT:
        """Return what `make` does. It may be a tensor that it got, or have new tensors."""
        made = make()
        self._made.append((made, make))
        return made

    def remade(self) -> Iterator[tuple[object, object]]:
        """Yield everything that was made, each with what is made of the weights now."""
        for made, make in self._made:
            yield made, make()


@dataclass(slots=True, frozen=True)
class AttentionSpec:
    """One rank's attention heads, and what is done to queries and keys before attention."""

    heads: HeadShape
    windows: list[int | None]
    """By layer: how many tokens a token sees, itself included. None: all tokens up to its own."""
    qk_norms_NH: list[Tensor | None]
    """By layer: the weights of the norms of the query heads, then the key heads. None: there are no such norms. With
    latent attention: those of the norm of latents, [1, size of a latent]."""
    norm_eps: float
    norm_offset: float
    """Is added to these weights."""
    ropes: list[Rope]
    """By layer. Layers with the same rotations have the same object."""
    scale: float
    """Scores are multiplied by it."""
    dtype: torch.dtype
    device: torch.device
    softcap: float | None
    """A score s becomes softcap·tanh(s / softcap), after the scale. None: it doesn't."""
    sinks_N: list[Tensor | None]
    """By layer: a logit of each query head that takes part in the softmax and adds nothing. None: there are none."""
    early_ropes: list[Rope] | None = None
    """By layer: rotations that come before the norms, instead of after them. `ropes` turn nothing then. None: heads are
    rotated after their norms."""
    query_scales_P: Tensor | None = None
    """What queries are multiplied by, by position. None: all by 1."""
    is_scaled: list[bool] | None = None
    """By layer, whether its queries are. None: all are."""
    chunks: list[int | None] | None = None
    """By layer: the number of tokens of a chunk of the sequence, within which tokens see each other. None: there are no
    chunks in the layer, or in any."""
    index_queries: list[Linear | None] = field(default_factory=list["Linear | None"])
    """By layer: makes the queries of what selects tokens, [T, heads · elements]. None: the layer sees the tokens that
    were selected last. Empty: none are."""
    copies: WeightCopies = field(default_factory=WeightCopies)
    """Makes whatever depends on `qk_norms_NH` and `sinks_N`."""

    @property
    def is_prepared(self) -> bool:
        """Whether queries or keys need `PreparedAttention`, with kernels or without."""
        return self.early_ropes is not None or self.query_scales_P is not None

    def of_layers(self, layers: Sequence[int]) -> AttentionSpec:
        """Return the spec of some of the layers, for what computes their attention after `PreparedAttention`."""
        return replace(
            self,
            windows=[self.windows[layer] for layer in layers],
            chunks=None if self.chunks is None else [self.chunks[layer] for layer in layers],
            qk_norms_NH=[self.qk_norms_NH[layer] for layer in layers],
            ropes=[self.ropes[layer] for layer in layers],
            sinks_N=[self.sinks_N[layer] for layer in layers],
            index_queries=[self.index_queries[layer] for layer in layers] if self.index_queries else [],
            early_ropes=None,
            query_scales_P=None,
        )

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        tp_size: int,
        constants: Sequence[MixerConstants],
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
        layers: Sequence[int] | None = None,
        copies: WeightCopies | None = None,
    ) -> AttentionSpec:
        """Return the spec of one of `tp_size` ranks.

        Args:
            constants: of the layers.
            max_length: maximum number of tokens of a sequence.
            layers: layers of the model with the same heads. None: all.
            copies: see the attribute. None: there are none yet.
        """
        layers = range(spec.num_layers) if layers is None else layers
        attention, scale = spec.attention_by_layer[layers[0]], spec.query_scale
        windows = [spec.layer_windows[layer] for layer in layers]
        rotations = [spec.rotations[layer] for layer in layers]
        made = {rotation: Rope(rotation, attention.rope_dim, max_length, device) for rotation in set(rotations)}
        ropes = [made[rotation] for rotation in rotations]
        early_ropes = None
        if spec.is_rotated_first:
            early_ropes, ropes = ropes, [Rope(None, attention.rope_dim, max_length, device)] * len(ropes)
        return cls(
            attention.heads(spec, tp_size),
            [None] * len(layers) if spec.windows_are_chunks else windows,
            [None if each.qk_norm_NH is None else each.qk_norm_NH.to(dtype) for each in constants],
            attention.head_norm_eps(spec),
            spec.norm_offset,
            ropes,
            1.0 / math.sqrt(attention.rope_dim) if spec.attention_scale is None else spec.attention_scale,
            dtype,
            device,
            spec.attention_softcap,
            [each.sinks_N for each in constants],
            early_ropes,
            None if scale is None else _query_scales(scale, max_length).to(device, dtype),
            None if scale is None or scale.with_rotation else [spec.rotations[layer] is None for layer in layers],
            windows if spec.windows_are_chunks else None,
            [each.index_queries for each in constants],
            WeightCopies() if copies is None else copies,
        )


def _query_scales(scale: QueryScale, max_length: int) -> Tensor:
    """Return float32[max_length + 1]."""
    periods_P = torch.arange(max_length + 1, dtype=torch.float32).add_(scale.shift).div_(scale.period).floor_()
    return periods_P.log1p_().mul_(scale.growth).add_(1.0)
