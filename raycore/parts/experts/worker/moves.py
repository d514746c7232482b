"""Which weights go from which worker to which, when the number of ranks that share experts changes.

The workers of a stage are numbered by their rank among those that share experts: in the order of dp_rank, then tp_rank.
A worker that stays has the same number before and after the change.
"""

from __future__ import annotations

from typing import NamedTuple

from raycore.parts.experts.models import MoeSpec


class Move(NamedTuple):
    """What one worker sends to another one."""

    source: int
    target: int
    experts: range
    """The experts of each sparse layer that `target` gets from `source`. May be empty."""
    is_new: bool
    """Whether `target` has no weights yet, and gets all that it needs beside experts from `source`, too."""


def plan_moves(moe: MoeSpec, num_ranks_before: int, num_ranks: int, tp_size: int) -> list[Move]:
    """Return all moves between the workers of a stage. All workers make them in this order.

    New ranks get what isn't an expert from the old ones in turn, each worker from one of the same `tp_rank`.
    """
    size_before, size = num_ranks_before * tp_size, num_ranks * tp_size
    moves: list[Move] = []
    for target in range(size):
        wanted = moe.whole_experts(target, size).experts
        dense_source = target % size_before if target >= size_before else None
        for source in range(size_before):
            held = moe.whole_experts(source, size_before).experts
            experts = range(max(held.start, wanted.start), min(held.stop, wanted.stop))
            if source != target and (experts or source == dense_source):
                moves.append(Move(source, target, experts, is_new=source == dense_source))
    return moves
