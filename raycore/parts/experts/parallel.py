"""How ranks share experts: which tokens each rank's experts process, and how the ranks' results are combined.

With `SplitExperts`, the tensor-parallel ranks of one engine each hold a part of every expert and have the same tokens.
With `ExpertParallel`, every worker of several engines is a rank and holds a few whole experts. In every sparse layer,
all engines' tokens go to all ranks, and the ranks' results are summed. All ranks must then run every step together,
even those without a token.

Shape suffixes: T this engine's tokens, N all engines' tokens, D hidden size.
"""

from __future__ import annotations

# torch's tensors are partially typed:
# pyright: reportUnknownMemberType=false
from typing import Protocol

import torch
from torch import Tensor

from raycore.parallel.collectives import Collectives
from raycore.parallel.tensor_parallel import TensorParallel


class ExpertRanks(Protocol):
    """The ranks that share the experts of every sparse layer.

    `is_last`: whether the layer is the last one, in which engines keep only the rows that they need.
    """

    def gather(self, x_TD: Tensor, is_last: bool) -> Tensor:
        """Return the rows [N, D] that this rank's experts process. `x_TD` has this engine's rows."""
        ...

    def own(self, x_NX: Tensor, is_last: bool) -> Tensor:
        """Return this engine's rows [T, X] of what was computed of the rows that `gather` has returned."""
        ...

    def reduce(self, out_ND: Tensor, is_last: bool) -> Tensor:
        """Return the sum of all ranks' `out_ND` for this engine's rows, [T, D]. May overwrite `out_ND`."""
        ...


class SplitExperts:
    """The tensor-parallel ranks of one engine. All have the same tokens, so N is T."""

    def __init__(self, ranks: TensorParallel) -> None:
        self.ranks = ranks

    def gather(self, x_TD: Tensor, is_last: bool) -> Tensor:
        return x_TD

    def own(self, x_NX: Tensor, is_last: bool) -> Tensor:
        return x_NX

    def reduce(self, out_ND: Tensor, is_last: bool) -> Tensor:
        return self.ranks.all_reduce_(out_ND)


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
        """Each engine's number of rows in this step: first for all layers but the last, then for the last layer."""

    def begin(self, num_tokens: int, num_kept: int) -> bool:
        """Exchange this step's numbers of rows with the other ranks. Returns whether any engine has a token in this
        step.

        Args:
            num_tokens: number of this engine's tokens.
            num_kept: number of those rows that go through the last layer's feed-forward part. Other rows are dropped
                before.
        """
        mine = torch.tensor([num_tokens, num_kept], device=self._device)
        by_rank = torch.stack(self._collectives.all_gather(mine)[:: self._tp_size])
        self._counts = by_rank.t().tolist()
        return any(self._counts[0])

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all engines in this step."""
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

    def own(self, x_NX: Tensor, is_last: bool) -> Tensor:
        counts = self._counts[is_last]
        start = sum(counts[: self._dp_rank])
        return x_NX[start : start + counts[self._dp_rank]]

    def reduce(self, out_ND: Tensor, is_last: bool) -> Tensor:
        return self.own(self._collectives.all_reduce_(out_ND), is_last) if len(out_ND) else out_ND

    def leave(self) -> None:
        """Disconnect from the other ranks. Idempotent."""
        self._collectives.close()
