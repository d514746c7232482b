"""The feed-forward part with xIELU, an activation with weights in each layer.

Shape suffixes: T tokens of the step, F intermediate size of the rank.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from raycore.layers.feed_forward import DenseFeedForward
from raycore.layers.part_place import PartPlace
from raycore.weights.layer_part_weights import XieluWeights

_CONSTANTS = (0.5, -1e-6)


class Xielu:
    """`p·x² + beta·x` of positive x, and `(n + beta)·(exp(min(x, eps)) - 1 - x) + beta·x` of others, in float32.

    p and n are `softplus` of the weights.

    Source: arXiv 2411.13010.
    """

    def __init__(self, alphas_2: Tensor, constants_2: Tensor | None) -> None:
        """The arguments are those of `XieluWeights`."""
        constants_2 = torch.tensor(_CONSTANTS, device=alphas_2.device) if constants_2 is None else constants_2.float()
        factors_2 = functional.softplus(alphas_2.float())
        self._beta_1, self._eps_1 = constants_2[:1].clone(), constants_2[1:].clone()
        self._positive_1, self._negative_1 = factors_2[:1].clone(), factors_2[1:].clone()

    def __call__(self, x_TF: Tensor) -> Tensor:
        wide_TF = x_TF.float()
        above_TF = wide_TF.square().mul_(self._positive_1)
        below_TF = torch.minimum(wide_TF, self._eps_1).expm1_().sub_(wide_TF).mul_(self._negative_1 + self._beta_1)
        return torch.where(wide_TF > 0, above_TF, below_TF).addcmul_(wide_TF, self._beta_1).to(x_TF.dtype)


class XieluFeedForward(DenseFeedForward):
    """`down(xielu(up(x)))`."""

    def __init__(self, place: PartPlace, weights: XieluWeights) -> None:
        assert weights.alphas_2 is not None, "each layer has them"
        device = place.operations.device
        self._alphas_2 = weights.alphas_2.to(device)
        self._constants_2 = None if weights.constants_2 is None else weights.constants_2.to(device)
        super().__init__(place, weights, Xielu(self._alphas_2, self._constants_2))

    def weights(self) -> XieluWeights:
        """Return the weights that the part was made of. Most are copies."""
        return XieluWeights(**vars(super().weights()), alphas_2=self._alphas_2, constants_2=self._constants_2)
