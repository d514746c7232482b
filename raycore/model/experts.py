"""How ranks share experts: which tokens each rank's experts process, and how their results are combined.

With `SplitExperts` the tensor-parallel ranks of one engine each hold a part of every expert and see the same tokens.
With `ExpertParallel` each rank of several engines holds a few whole experts: in every sparse layer all tokens go to all
ranks, and all results are summed. All ranks must then run every step together, also those without a token.

Shape suffixes: T this engine's tokens, N all engines' tokens, D hidden.
"""

from __future__ import annotations

# torch's tensors are partially typed:
# pyright: reportUnknownMemberType=false
from typing import Protocol

import torch
from torch import Tensor

from raycore.model.collectives import Collectives
from raycore.model.layers import TensorParallel


class ExpertRanks(Protocol):
    """The ranks that share the experts of every sparse layer.

    `is_last` is True for the last layer, in which engines keep only the rows that they need.
    """

    def gather(self, x_TD: Tensor, is_last: bool) -> Tensor:
        """The tokens [N, D] that this rank's experts process."""
        ...

    def reduce(self, out_ND: Tensor, is_last: bool) -> Tensor:
        """The sum of all ranks' results for this engine's tokens, [T, D]. May overwrite `out_ND`."""
        ...


class SplitExperts:
    """The ranks of one engine, which all have the same tokens: N is T."""

    def __init__(self, ranks: TensorParallel) -> None:
        self._ranks = ranks

    def gather(self, x_TD: Tensor, is_last: bool) -> Tensor:
        return x_TD

    def reduce(self, out_ND: Tensor, is_last: bool) -> Tensor:
        return self._ranks.all_reduce_(out_ND)


class ExpertParallel:
    """All ranks of all engines, in the order of dp_rank, then tp_rank.

    An engine's tensor-parallel ranks have the same tokens, so each sends an equal share of them.
    """

    def __init__(
        self, dp_rank: int, tp_rank: int, tp_size: int, collectives: Collectives, device: torch.device
    ) -> None:
        self._dp_rank = dp_rank
        self._tp_rank = tp_rank
        self._tp_size = tp_size
        self._collectives = collectives
        self._device = device
        self._counts: list[list[int]] = [[], []]
        """By `is_last`: each engine's number of rows in this step."""

    def begin(self, num_tokens: int, num_kept: int) -> bool:
        """Tell the other ranks this step's numbers of rows. Returns whether any engine has a token.

        Args:
            num_tokens: this engine's tokens.
            num_kept: rows that go through the last layer.
        """
        mine = torch.tensor([num_tokens, num_kept], device=self._device)
        by_rank = torch.stack(self._collectives.all_gather(mine)[:: self._tp_size])
        self._counts = by_rank.t().tolist()
        return any(self._counts[0])

    @property
    def num_tokens(self) -> int:
        """Tokens of all engines in this step."""
        return sum(self._counts[False])

    def gather(self, x_TD: Tensor, is_last: bool) -> Tensor:
        counts = self._counts[is_last]
        assert len(x_TD) == counts[self._dp_rank], "begin() announced another number of rows"
        num_sent = -(-max(counts) // self._tp_size)
        if not num_sent:
            return x_TD
        mine = x_TD[self._tp_rank * num_sent : (self._tp_rank + 1) * num_sent]
        padded = torch.cat([mine, mine.new_zeros(num_sent - len(mine), mine.shape[1])])
        by_engine = torch.cat(self._collectives.all_gather(padded)).view(len(counts), -1, x_TD.shape[1])
        return torch.cat([rows[:count] for rows, count in zip(by_engine, counts, strict=True)])

    def reduce(self, out_ND: Tensor, is_last: bool) -> Tensor:
        counts = self._counts[is_last]
        if not len(out_ND):
            return out_ND
        start = sum(counts[: self._dp_rank])
        return self._collectives.all_reduce_(out_ND)[start : start + counts[self._dp_rank]]

    def leave(self) -> None:
        """Leave the group of ranks. Idempotent."""
        self._collectives.close()
