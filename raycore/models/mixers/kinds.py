"""The kinds of mixers that there are, and which of them a model has. Does not import torch.

A new kind of layers that keep a state is named in `StateSpec`. A family gives it to the model as `Parts.state`.
"""

from __future__ import annotations

__all__ = ["REFUSED_ADAPTERS", "StateSpec", "attention_of", "kinds_of", "mixers_of"]

from collections.abc import Mapping
from typing import TYPE_CHECKING, get_args

from raycore.models.mixers.attention import AttentionHeads
from raycore.models.mixers.beside import BesideSpec
from raycore.models.mixers.delta import DeltaSpec
from raycore.models.mixers.kda import KdaSpec
from raycore.models.mixers.latent import LatentHeads
from raycore.models.mixers.lightning import LightningSpec
from raycore.models.mixers.mamba2 import Mamba2Spec
from raycore.models.mixers.no_mixer import NO_MIXER
from raycore.models.mixers.short_conv import ShortConvSpec
from raycore.models.mixers.spec import MixerSpec

if TYPE_CHECKING:
    from raycore.models.spec import ModelSpec  # it has mixers

StateSpec = BesideSpec | DeltaSpec | KdaSpec | LightningSpec | Mamba2Spec | ShortConvSpec
"""The layers of a model that keep a state."""
REFUSED_ADAPTERS: Mapping[str, str] = {
    part: why for kind in (LatentHeads, *get_args(StateSpec)) for part, why in kind.refused_adapters.items()
}
"""Parts of the names of tensors that adapters of no model may have, and why."""


def attention_of(model: ModelSpec) -> AttentionHeads | LatentHeads:
    """Return the attention of all layers of the model that have it."""
    return AttentionHeads() if model.latent is None else model.latent


def kinds_of(model: ModelSpec) -> list[MixerSpec]:
    """Return what mixes tokens in some layer of the model, each one once."""
    attends = model.state is None or any(mixer.cached_numbers(model, 1) for mixer in mixers_of(model))
    kinds: list[MixerSpec] = [attention_of(model)] if attends else []
    kinds += [] if model.state is None else [model.state]
    return [*kinds, NO_MIXER] if "feed_forward" in model.parts_alone else kinds


def mixers_of(model: ModelSpec) -> list[MixerSpec]:
    """Return what mixes tokens, by layer of the model."""
    attention, state = attention_of(model), model.state
    mixers = (
        [attention] * model.num_layers if state is None else [state if each else attention for each in state.layers]
    )
    alone = model.parts_alone or [None] * len(mixers)
    return [NO_MIXER if only == "feed_forward" else mixer for only, mixer in zip(alone, mixers, strict=True)]
