"""`SamplingKernels` with native kernels for CPUs."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycore.sampling.kernels import SamplingKernels
from raycore.sampling.logprobs import Logprobs
from raycore.sampling.picking import DrawLimits

_MAX_LIKELY = 64
"""Of so many tokens, the native kernel computes log probabilities."""


class NativeSampling(SamplingKernels):
    """Native kernels mask logits and pick tokens. `raycore.kernels` must be loaded."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), batch_invariant=True)

    def mask(self, logits_RV: Tensor, rows_M: NDArray[np.int64], masks_MB: NDArray[np.uint8]) -> None:
        torch.ops.raycore.mask_logits.default(logits_RV, torch.as_tensor(rows_M), torch.as_tensor(masks_MB))

    def most_likely(self, logits_RV: Tensor) -> Tensor:
        return torch.ops.raycore.most_likely.default(logits_RV)

    def draw(self, logits_RV: Tensor, limits: DrawLimits) -> Tensor:
        return torch.ops.raycore.draw.default(logits_RV, torch.as_tensor(limits.matrix()))

    def logprobs(self, logits_RV: Tensor, token_ids_R: Tensor, num_likely: int) -> Logprobs:
        if num_likely > _MAX_LIKELY:
            return super().logprobs(logits_RV, token_ids_R, num_likely)
        return Logprobs(*torch.ops.raycore.logprobs.default(logits_RV, token_ids_R, num_likely))
