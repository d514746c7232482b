"""Attention that computes every score, for what SDPA (scaled dot-product attention) doesn't know: caps and sinks.

Shape suffixes: P pairs of a sequence and a key-value head, G query heads for each of those, T tokens, H elements of a
head, L keys, N query heads.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from raycore.attention.spec import AttentionSpec

SCORE_BYTES = 32 << 20
"""Maximum bytes of one tensor of scores, unless those of one token for each pair take more."""


class ExplicitAttention:
    """Dense attention of one layer whose scores have a cap, or whose query heads have sinks.

    A score s becomes cap·tanh(s / cap). A sink is one more score of each token, whose key has no value.
    """

    def __init__(self, scale: float, softcap: float | None, sinks_N: Tensor | None, num_kv_heads: int) -> None:
        self._scale = scale
        self._softcap = softcap
        self._sinks_KG11 = None if sinks_N is None else sinks_N.float().view(num_kv_heads, -1, 1, 1)

    @classmethod
    def of_layers(cls, spec: AttentionSpec) -> list[ExplicitAttention | None]:
        """Return each layer's. None: SDPA can compute the layer."""
        return [
            None
            if spec.softcap is None and sinks_N is None
            else spec.copies(partial(cls, spec.scale, spec.softcap, sinks_N, spec.heads.num_kv_heads))
            for sinks_N in spec.sinks_N
        ]

    def __call__(self, q_PGTH: Tensor, keys_PLH: Tensor, values_PLH: Tensor, mask_TL: Tensor | None) -> Tensor:
        """Return [P, G, T, H]. The pairs of a sequence are neighbors. `mask_TL`: is added to scores, as [..., T, L]."""
        num_pairs, group, num_tokens, _ = q_PGTH.shape
        size = at_a_time(num_pairs * group * keys_PLH.shape[1])
        if size >= num_tokens:
            return self._attend(q_PGTH, keys_PLH, values_PLH, mask_TL)
        parts = [
            self._attend(q_PGTH[:, :, rows], keys_PLH, values_PLH, None if mask_TL is None else mask_TL[..., rows, :])
            for rows in (slice(first, first + size) for first in range(0, num_tokens, size))
        ]
        return torch.cat(parts, 2)

    def _attend(self, q_PGTH: Tensor, keys_PLH: Tensor, values_PLH: Tensor, mask_TL: Tensor | None) -> Tensor:
        shape = q_PGTH.shape
        scores = torch.bmm(q_PGTH.reshape(shape[0], -1, shape[3]), keys_PLH.transpose(1, 2)).float()
        if self._softcap is None:
            scores.mul_(self._scale)
        else:
            scores.mul_(self._scale / self._softcap).tanh_().mul_(self._softcap)
        scores_PGTL = scores.view(*shape[:3], -1)
        if mask_TL is not None:
            scores_PGTL.add_(mask_TL)
        weights = self._weights(scores_PGTL).to(values_PLH.dtype)
        return torch.bmm(weights.view(shape[0], -1, weights.shape[3]), values_PLH).view(shape)

    def _weights(self, scores_PGTL: Tensor) -> Tensor:
        """Return the softmax of the scores, with sinks if there are any. Overwrites the scores."""
        if self._sinks_KG11 is None:
            return torch.softmax(scores_PGTL, -1)
        sinks_PG11 = self._sinks_KG11.repeat(len(scores_PGTL) // len(self._sinks_KG11), 1, 1, 1)
        largest_PGT1 = torch.maximum(scores_PGTL.amax(-1, keepdim=True), sinks_PG11)
        weights_PGTL = scores_PGTL.sub_(largest_PGT1).exp_()
        return weights_PGTL.div_(weights_PGTL.sum(-1, keepdim=True).add_((sinks_PG11 - largest_PGT1).exp_()))


def at_a_time(num_numbers: int) -> int:
    """Return how many tokens are computed together. `num_numbers`: how many float32 numbers one of them takes."""
    return max(1, SCORE_BYTES // (num_numbers * torch.float32.itemsize))
