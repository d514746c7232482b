"""What masks logits and picks tokens on a device, in plain torch. Subclasses do so with kernels of their own."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycore.sampling import picking
from raycore.sampling.logprobs import Logprobs, logprobs
from raycore.sampling.picking import DrawLimits
from raycore.step.copies import to_device

_MASKS_AT_A_TIME = 16
"""They are unpacked to a byte for each token."""


class SamplingKernels:
    """Masks logits, and picks tokens. Row i of a result depends only on row i of the logits."""

    def __init__(self, device: torch.device, *, batch_invariant: bool = False) -> None:
        """`batch_invariant`: make the bits of each row's result independent of the other rows."""
        self.device = device
        self._batch_invariant = batch_invariant

    def mask(self, logits_RV: Tensor, rows_M: NDArray[np.int64], masks_MB: NDArray[np.uint8]) -> None:
        """Set the logits of tokens that may not come to minus infinity, in place. All other bits stay as they are.

        Args:
            logits_RV: float32, with contiguous rows.
            rows_M: the row that each mask is for, in ascending order.
            masks_MB: a bit for each token, 1 if it may come; the lowest of a byte first, in whole words of 32 bits.
        """
        for first in range(0, len(rows_M), _MASKS_AT_A_TIME):
            rows, masks = rows_M[first : first + _MASKS_AT_A_TIME], masks_MB[first : first + _MASKS_AT_A_TIME]
            unpacked: NDArray[np.uint8] = np.unpackbits(~masks, axis=-1, count=logits_RV.shape[1], bitorder="little")
            is_forbidden_NV = unpacked.view(np.bool_)  # pyright: ignore[reportUnknownMemberType]
            forbidden_NV = to_device(is_forbidden_NV, logits_RV.device)
            if rows[-1] - rows[0] + 1 == len(rows):
                logits_RV[rows[0] : rows[-1] + 1].masked_fill_(forbidden_NV, -torch.inf)
                continue
            for row, forbidden_V in zip(rows.tolist(), forbidden_NV, strict=True):
                logits_RV[row].masked_fill_(forbidden_V, -torch.inf)

    def most_likely(self, logits_RV: Tensor) -> Tensor:
        """Return int64[R]: each row's most likely token. If several are equally likely, the first of them."""
        return picking.most_likely(logits_RV)

    def draw(self, logits_RV: Tensor, limits: DrawLimits) -> Tensor:
        """Return int64[R]: the token that each row draws."""
        return picking.draw(logits_RV, limits, self._batch_invariant)

    def logprobs(self, logits_RV: Tensor, token_ids_R: Tensor, num_likely: int) -> Logprobs:
        """Return the log probabilities of each row's token, int64[R], and of its `num_likely` most likely tokens."""
        return logprobs(logits_RV, token_ids_R, num_likely, self._batch_invariant)
