"""What picks tokens from logits on a device, in plain torch. Subclasses do so with kernels of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from raycore.sampling import picking
from raycore.sampling.logprobs import Logprobs, logprobs
from raycore.sampling.picking import DrawLimits


class SamplingKernels:
    """Picks tokens. Row i of a result depends only on row i of the logits."""

    def __init__(self, device: torch.device, *, batch_invariant: bool = False) -> None:
        """`batch_invariant`: make the bits of each row's result independent of the other rows."""
        self.device = device
        self._batch_invariant = batch_invariant

    def most_likely(self, logits_RV: Tensor) -> Tensor:
        """Return int64[R]: each row's most likely token. If several are equally likely, the first of them."""
        return picking.most_likely(logits_RV)

    def draw(self, logits_RV: Tensor, limits: DrawLimits) -> Tensor:
        """Return int64[R]: the token that each row draws."""
        return picking.draw(logits_RV, limits, self._batch_invariant)

    def logprobs(self, logits_RV: Tensor, token_ids_R: Tensor, num_likely: int) -> Logprobs:
        """Return the log probabilities of each row's token, int64[R], and of its `num_likely` most likely tokens."""
        return logprobs(logits_RV, token_ids_R, num_likely, self._batch_invariant)
