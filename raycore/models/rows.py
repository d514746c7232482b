"""Which rows of a checkpoint's tensor a tensor-parallel rank holds. Does not import torch.

The weight of a projection has a row for each output. A projection that ranks divide by its inputs has columns instead:
these are the rows of the projections whose outputs it reads.
"""

from __future__ import annotations

__all__ = ["Rows", "divided", "stored_together", "whole"]

from itertools import accumulate
from typing import NamedTuple


class Rows(NamedTuple):
    """The rows of a projection, or of another tensor, that a rank holds."""

    name: str
    """The projection's name within its layer, such as `self_attn.q_proj`. Of another tensor: its whole name there."""
    total: int
    """Number of rows on all ranks together."""
    start: int
    num: int
    stored_first: int = 0
    """The row of its tensor at which the projection begins. Several projections may share a tensor."""
    stored_total: int = 0
    """Number of rows of its tensor. 0: it has the tensor for itself."""

    @property
    def part(self) -> slice:
        """The rank's rows among all of the projection."""
        return slice(self.start, self.start + self.num)

    @property
    def stored_part(self) -> slice:
        """The rank's rows among all of the tensor."""
        return slice(self.stored_first + self.start, self.stored_first + self.start + self.num)

    @property
    def num_stored(self) -> int:
        """Number of rows of the tensor."""
        return self.stored_total or self.total


def whole(name: str, num: int) -> Rows:
    """Return rows of which every rank has all."""
    return Rows(name, num, 0, num)


def divided(name: str, total: int, tp_rank: int, tp_size: int) -> Rows:
    """Return rows of which each of `tp_size` ranks has an equal part."""
    num = total // tp_size
    return Rows(name, total, tp_rank * num, num)


def stored_together(name: str | None, *parts: Rows) -> tuple[Rows, ...]:
    """Return rows as those of one tensor, in which they come one after the other. None: each has its own."""
    if name is None:
        return parts
    total = sum(part.total for part in parts)
    firsts = accumulate((part.total for part in parts[:-1]), initial=0)
    return tuple(
        part._replace(name=name, stored_first=first, stored_total=total)
        for part, first in zip(parts, firsts, strict=True)
    )
