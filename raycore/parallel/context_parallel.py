"""The workers that each have the keys and values of some of a sequence's tokens, as attention sees them."""

from __future__ import annotations

import torch
from torch import Tensor

from raycore.parallel.collectives import Collectives


class ContextParallel:
    """Connects a worker to those that have the other keys and values of the same heads. Implements `ContextGroup`.

    They are some tensor-parallel ranks, whose query heads differ, in each of some groups of workers that compute the
    same. They are numbered by group, and in each group by rank.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        collectives: Collectives,
        query_rank: int = 0,
        num_query_parts: int = 1,
        query_collectives: Collectives | None = None,
    ) -> None:
        """
        Args:
            rank: this worker's number among the `size` workers that share tokens, which `collectives` connects.
            query_rank: its number among the `num_query_parts` of them whose query heads differ.
            query_collectives: connects these. None: all have the same.
        """
        self.rank = rank
        self.size = size
        self.num_query_parts = num_query_parts
        self._query_rank = query_rank
        self._collectives = collectives
        self._query_collectives = query_collectives

    def gather_queries(self, q_TX: Tensor) -> Tensor:
        """Return the queries of the workers whose heads differ side by side, [T, X · num_query_parts]."""
        if self._query_collectives is None:
            return q_TX.contiguous()
        return torch.cat(self._query_collectives.all_gather(q_TX), dim=1)

    def exchange_parts(self, x_TX: Tensor) -> Tensor:
        """Return what all workers have computed for this worker's heads, [P, T, X / num_query_parts].

        `x_TX`: what this worker has computed for the heads of all, one worker's after the other's.
        """
        width = x_TX.shape[1] // self.num_query_parts
        return self._collectives.gather_columns(x_TX, slice(self._query_rank * width, (self._query_rank + 1) * width))

    def leave(self) -> None:
        """Disconnect from the other workers. Idempotent."""
        self._collectives.close()
        if self._query_collectives is not None:
            self._query_collectives.close()
