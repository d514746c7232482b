"""The interface between what knows the sequences of a step and what computes their states.

Each layer has the states of R rows. Every running request has rows of its own, and others keep states of prefixes.

Shape suffixes: n sequences, T tokens, S saves, N value heads, G key heads, K elements of a key head, H of a value head,
C channels of the convolution, W taps of the convolution, R rows, X inputs. What the gated delta rule calls queries and
keys, Mamba-2 calls C and B; groups are key heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raycore.kernels.state_tables import StateTables

FROM_ZERO = -1
"""Instead of the row from which a sequence's state is read: the sequence begins."""


@dataclass(slots=True, frozen=True)
class StateStep:
    """The sequences of a step. The host knows all of this from the plan."""

    sequences_n4: NDArray[np.int32]
    """For each sequence: its first token among the T, its number of tokens, the row that its state is read from, or
    `FROM_ZERO`, and the row that the state after its last token is written to. Sequences with one token come first.
    Several sequences may read the same row, but no row that one writes is another's, for reading or for writing."""
    num_decodes: int
    """How many sequences at the beginning have one token."""
    saves_S3: NDArray[np.int32]
    """More rows that states are written to: the sequence's index, a number of its tokens, at least 1 and less than all,
    and the row that gets the state after so many of its tokens. Ordered by sequence, then by the number of tokens."""
    tables: StateTables | None = None
    """The same on the device, for kernels that run there. None: they copy it there themselves, once in a step. Graphs
    need tables that stay where they are."""
