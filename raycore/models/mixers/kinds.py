"""The kinds of mixers that there are, and which of them a model has. Does not import torch.

A new kind of layers that keep a state is named in `StateSpec`. A family gives it to the model as `Parts.state`.
"""

from __future__ import annotations

__all__ = ["REFUSED_ADAPTERS", "StateSpec", "attention_by_layer", "attentions_of", "kinds_of", "mixers_of"]

from collections.abc import Mapping, Sequence
from itertools import compress
from typing import TYPE_CHECKING, get_args

from raycore.models.mixers.attention import AttentionHeads, heads_of
from raycore.models.mixers.beside import BesideSpec
from raycore.models.mixers.block_selecting import BlockIndexer, block_selecting_heads
from raycore.models.mixers.delta import DeltaSpec
from raycore.models.mixers.kda import KdaSpec
from raycore.models.mixers.latent import LatentHeads
from raycore.models.mixers.lightning import LightningSpec
from raycore.models.mixers.mamba1 import Mamba1Spec
from raycore.models.mixers.mamba2 import Mamba2Spec
from raycore.models.mixers.no_mixer import NO_MIXER
from raycore.models.mixers.selecting import Indexer, selecting_heads
from raycore.models.mixers.sharing import sharing_by_layer
from raycore.models.mixers.short_conv import ShortConvSpec
from raycore.models.mixers.spec import MixerSpec

if TYPE_CHECKING:
    from raycore.models.spec import ModelSpec  # it has mixers

StateSpec = BesideSpec | DeltaSpec | KdaSpec | LightningSpec | Mamba1Spec | Mamba2Spec | ShortConvSpec
"""The layers of a model that keep a state."""
REFUSED_ADAPTERS: Mapping[str, str] = {
    part: why for kind in (LatentHeads, *get_args(StateSpec)) for part, why in kind.refused_adapters.items()
}
"""Parts of the names of tensors that adapters of no model may have, and why."""


def attention_by_layer(model: ModelSpec) -> Sequence[AttentionHeads | LatentHeads]:
    """Return the attention that each layer of the model would have. For a model without layers, there is one."""
    if model.latent is None:
        heads, indexer = heads_of(model), model.indexer
        return block_selecting_heads(heads, indexer) if isinstance(indexer, BlockIndexer) else heads
    if isinstance(model.indexer, Indexer):
        return selecting_heads(model, model.latent, model.indexer)
    return [model.latent] * max(1, model.num_layers)


def attentions_of(model: ModelSpec) -> list[AttentionHeads | LatentHeads]:
    """Return the attention that some layer of the model has, each one once. If none has any: what one would have."""
    of_layers, state = model.attention_by_layer, model.state
    has_it = [True] * len(of_layers) if state is None else [not each for each in state.layers]
    found = list({id(each): each for each in compress(of_layers, has_it)}.values())
    return found or [of_layers[0]]


def kinds_of(model: ModelSpec) -> list[MixerSpec]:
    """Return what mixes tokens in some layer of the model, each one once."""
    attends = model.state is None or any(mixer.cached_numbers(model, 1) for mixer in model.mixers)
    of_attention: list[MixerSpec] = [*model.attentions]
    if model.norms_values:
        of_attention = list({id(each): each for each in model.mixers}.values())
    kinds: list[MixerSpec] = [*(of_attention if attends else []), *([] if model.state is None else [model.state])]
    return [*kinds, NO_MIXER] if "feed_forward" in model.parts_alone else kinds


def mixers_of(model: ModelSpec) -> list[MixerSpec]:
    """Return what mixes tokens, by layer of the model."""
    attention, state = model.attention_by_layer[: model.num_layers], model.state
    mixers: list[MixerSpec] = [*(sharing_by_layer(model) if model.norms_values else attention)]
    if state is not None:
        mixers = [state if each else own for each, own in zip(state.layers, attention, strict=True)]
    alone = model.parts_alone or [None] * len(mixers)
    return [NO_MIXER if only == "feed_forward" else mixer for only, mixer in zip(alone, mixers, strict=True)]
