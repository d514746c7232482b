"""The weights of multi-head latent attention. The loader fills them.

Shape suffixes: D hidden size, O this rank's rows of the fused first layer, Q size of the vector that queries are made
of, R size of a latent, P and X this rank's rows of the layers that read these two, Y this rank's outputs of attention.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from raycore.weights.weight import Weight


@dataclass
class LatentWeights:
    """The weights of latent attention in one layer on one rank."""

    inputs_OD: Weight
    """What queries are made of, or this rank's queries; then latents and rotated keys."""
    inputs_bias_O: Tensor | None
    """Zero for queries."""
    q_norm_Q: Tensor | None
    """None, like `q_b_PQ`, if the first layer makes queries."""
    q_b_PQ: Weight | None
    """This rank's queries."""
    kv_norm_R: Tensor
    kv_b_XR: Tensor
    """This rank's heads, each with its key and then its value. It is never quantized, because it is applied to queries
    and to the results of attention, and not to latents."""
    o_DY: Weight
    """The columns for this rank's heads."""
    o_bias: Tensor | None
    """None on ranks other than tp_rank 0, like `MlpWeights.down_bias`."""

    @property
    def num_weights(self) -> int:
        """Number of multiplications for one token, without those of attention."""
        q_b = 0 if self.q_b_PQ is None else self.q_b_PQ.numel()
        return self.inputs_OD.numel() + q_b + self.kv_b_XR.numel() + self.o_DY.numel()
