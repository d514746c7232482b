"""One rank's weights of layers that keep a state. The loader fills them.

They are kept in the model's data type, whatever the checkpoint stores. Shape suffixes: D hidden size, I this rank's
rows of a projection, C its channels of the convolution, W taps, N its value heads, H elements of one, O those of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from raycore.weights.mixer_weights import MixerWeights


@dataclass
class DeltaWeights(MixerWeights):
    """The weights of the gated delta rule in one layer on one rank."""

    qkvz_ID: torch.Tensor
    """The rows of queries, keys, values and the gate z: of one key head after the other if `DeltaSpec.is_interleaved`,
    otherwise of all heads one after the other."""
    ba_ID: torch.Tensor
    """Those of b and a, in the same order."""
    conv_CW: torch.Tensor
    decay_N: torch.Tensor
    """float32: the logarithm of how fast states decay."""
    bias_N: torch.Tensor
    """float32: of a."""
    norm_H: torch.Tensor
    o_DO: torch.Tensor

    NAMES: ClassVar[Mapping[str, str]] = {
        "qkvz_ID": "linear_attn.in_proj_qkvz.weight",
        "ba_ID": "linear_attn.in_proj_ba.weight",
        "conv_CW": "linear_attn.conv1d.weight",
        "decay_N": "linear_attn.A_log",
        "bias_N": "linear_attn.dt_bias",
        "norm_H": "linear_attn.norm.weight",
        "o_DO": "linear_attn.out_proj.weight",
    }
    MULTIPLIED: ClassVar[tuple[str, ...]] = ("qkvz_ID", "ba_ID", "o_DO")


@dataclass
class Mamba2Weights(MixerWeights):
    """The weights of Mamba-2 in one layer on one rank."""

    in_ID: torch.Tensor
    """The rows of x, of B, of C and of times, in this order. With a single group, every rank has those of B and C."""
    z_OD: torch.Tensor
    """Those of the gate."""
    conv_CW: torch.Tensor
    decay_N: torch.Tensor
    """float32: the logarithm of how fast states decay."""
    bias_N: torch.Tensor
    """float32: of times."""
    skip_N: torch.Tensor
    """float32: what x is multiplied by before it is added to the result."""
    norm_O: torch.Tensor
    o_DO: torch.Tensor
    conv_bias_C: torch.Tensor | None = None

    NAMES: ClassVar[Mapping[str, str]] = {
        "in_ID": "mamba.in_proj.weight",
        "z_OD": "mamba.z_proj.weight",
        "conv_CW": "mamba.conv1d.weight",
        "conv_bias_C": "mamba.conv1d.bias",
        "decay_N": "mamba.A_log",
        "bias_N": "mamba.dt_bias",
        "skip_N": "mamba.D",
        "norm_O": "mamba.norm.weight",
        "o_DO": "mamba.out_proj.weight",
    }
    MULTIPLIED: ClassVar[tuple[str, ...]] = ("in_ID", "z_OD", "o_DO")
