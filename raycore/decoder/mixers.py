"""Makes what mixes the tokens of a sequence in a layer, by the kind of its weights."""

from __future__ import annotations

import torch
from torch import Tensor

from raycore.decoder.attention_mixer import AttentionMixer
from raycore.decoder.delta_mixer import DeltaMixer
from raycore.decoder.latent_mixer import LatentMixer
from raycore.decoder.mamba2_mixer import Mamba2Mixer
from raycore.decoder.mixer import Adapt, Mixer
from raycore.layers.operations import Operations
from raycore.models.spec import ModelSpec
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.weights.latent_weights import LatentWeights
from raycore.weights.loader import MixerWeights
from raycore.weights.state_weights import DeltaWeights, Mamba2Weights, StateWeights


def make_mixer(
    stage_index: int,
    index: int,
    spec: ModelSpec,
    weights: MixerWeights,
    ranks: TensorParallel,
    operations: Operations,
    adapt: Adapt,
) -> Mixer:
    """Return a layer's mixer. The arguments are those of `AttentionMixer`."""
    if isinstance(weights, DeltaWeights):
        return DeltaMixer(stage_index, spec, weights, ranks, operations)
    if isinstance(weights, Mamba2Weights):
        return Mamba2Mixer(stage_index, spec, weights, ranks, operations)
    if isinstance(weights, LatentWeights):
        return LatentMixer(stage_index, index, spec, weights, ranks, operations, adapt)
    return AttentionMixer(stage_index, index, spec, weights, ranks, operations, adapt)


def state_constants(weights: StateWeights, device: torch.device) -> dict[str, Tensor | None]:
    """Return what a layer that keeps a state computes with besides linear layers: fields of its `StateLayer`."""
    names = ["conv_CW", "decay_N", "bias_N"]
    if isinstance(weights, Mamba2Weights):
        names += ["conv_bias_C", "skip_N"]
    tensors: dict[str, Tensor | None] = {name: getattr(weights, name) for name in names}
    return {name: None if each is None else each.to(device) for name, each in tensors.items()}
