"""`SamplingKernels` with Triton kernels for GPUs. None of them waits for the GPU."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from raycore.kernels.gpu import sampling
from raycore.sampling.kernels import SamplingKernels
from raycore.sampling.picking import DrawLimits
from raycore.step.copies import to_device, to_device_together


class GpuSampling(SamplingKernels):
    """Triton kernels mask logits and pick tokens. Torch computes log probabilities."""

    def mask(self, logits_RV: Tensor, rows_M: NDArray[np.int64], masks_MB: NDArray[np.uint8]) -> None:
        sampling.mask(logits_RV, *to_device_together([rows_M, masks_MB], self.device))

    def most_likely(self, logits_RV: Tensor) -> Tensor:
        return sampling.most_likely(logits_RV)

    def draw(self, logits_RV: Tensor, limits: DrawLimits) -> Tensor:
        return sampling.draw(logits_RV, to_device(limits.matrix(), self.device))
