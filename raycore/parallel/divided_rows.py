"""Workers that divide a step's rows among themselves, except in attention."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from raycore.parallel.collectives import Collectives
from raycore.step.batch import Ints, StepInputs
from raycore.step.copies import to_device
from raycore.step.row_shares import RowShares, share_rows


class DividedRows:
    """One worker's rows of the present step, and those of the others. Implements `StepRows`."""

    def __init__(self, rank: int, size: int, collectives: Collectives, device: torch.device) -> None:
        """`rank`: the worker's number among the `size` workers that `collectives` connects."""
        self._rank = rank
        self._size = size
        self._collectives = collectives
        self._device = device
        self.shares: RowShares | None = None
        """None: every worker computes all rows of the step."""
        self._rows = self._places_T = torch.empty(0)

    def begin(self, step: StepInputs) -> None:
        """Divide the rows of `step`."""
        self.shares = share_rows(step, self._rank, self._size)
        if self.shares is not None:
            self._rows = to_device(self.shares.rows, self._device)
            self._places_T = to_device(self.shares.places, self._device)

    @property
    def is_divided(self) -> bool:
        """Whether other workers compute some of the step's rows."""
        return self.shares is not None

    def count(self, step: StepInputs) -> int:
        """Return how many of the step's rows are this worker's."""
        return len(step.positions) if self.shares is None else len(self.shares.rows)

    def of_numbers(self, numbers_T: Ints) -> Ints:
        """Return this worker's of the numbers of all rows, on the host."""
        return numbers_T if self.shares is None else numbers_T[self.shares.rows]

    def own(self, x_TX: Tensor) -> Tensor:
        """Return this worker's rows of all."""
        return x_TX if self.shares is None else x_TX.index_select(0, self._rows)

    def gather(self, own_TX: Tensor) -> Tensor:
        """Return the rows of all workers, in the order of the step."""
        if self.shares is None:
            return own_TX
        # all workers exchange equally many
        padding = [0, 0] * (own_TX.dim() - 1) + [0, self.shares.most_rows - len(own_TX)]
        return torch.cat(self._collectives.all_gather(functional.pad(own_TX, padding))).index_select(0, self._places_T)

    def of_first(self, x: Tensor) -> Tensor:
        """Return the first worker's `x`. Workers that compute the same may round differently."""
        return self._collectives.all_gather(x)[0]

    def leave(self) -> None:
        """Disconnect from the other workers. Idempotent."""
        self._collectives.close()
