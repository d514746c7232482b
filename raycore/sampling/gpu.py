"""`SamplingKernels` with Triton kernels for GPUs. None of them waits for the GPU."""

from __future__ import annotations

from torch import Tensor

from raycore.kernels.gpu import sampling
from raycore.sampling.kernels import SamplingKernels
from raycore.sampling.picking import DrawLimits
from raycore.step.copies import to_device


class GpuSampling(SamplingKernels):
    """Triton kernels pick tokens. Torch computes log probabilities."""

    def most_likely(self, logits_RV: Tensor) -> Tensor:
        return sampling.most_likely(logits_RV)

    def draw(self, logits_RV: Tensor, limits: DrawLimits) -> Tensor:
        return sampling.draw(logits_RV, to_device(limits.matrix(), self.device))
