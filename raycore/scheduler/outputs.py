"""The outputs of one step, to be split among clients and merged over steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from raycore.messages import OutputBatch, SequenceNews, client_of

if TYPE_CHECKING:
    from numpy.typing import NDArray


class StepOutputs(SequenceNews, eq=False):
    """One step's outputs. The arrays are read-only and may be shared with the scheduler."""

    seq_ids: NDArray[np.int64] = np.empty(0, np.int64)
    """int64[k]: the sequence that got `token_ids[i]`. Each seq_id occurs once."""
    token_ids: NDArray[np.int32] = np.empty(0, np.int32)
    """int32[k]."""
    duration_s: float = 0.0
    """Seconds from the step's plan to its result. Set by the engine, like `queued`."""
    flush_interval_s: float = math.inf
    """The smallest flush interval among the requests with new tokens; infinite if there is no new token."""

    def by_client(self) -> list[tuple[int, StepOutputs]]:
        """The outputs of each client. Usually there is one client, and then nothing is copied."""
        clients = client_of(self.seq_ids)
        named = self.clients()
        if len(clients):
            low, high = int(clients.min()), int(clients.max())
            named |= {low} if low == high else set(np.unique(clients).tolist())
        if len(named) <= 1:
            return [(client, self) for client in named]
        return [(client, self._for_client(client, clients == client)) for client in sorted(named)]

    def _for_client(self, client: int, is_its: NDArray[np.bool_]) -> StepOutputs:
        return StepOutputs(
            **self.entries_of(client),
            seq_ids=self.seq_ids[is_its],
            token_ids=self.token_ids[is_its],
            duration_s=self.duration_s,
            flush_interval_s=self.flush_interval_s,
        )

    @staticmethod
    def merge(steps: Sequence[tuple[StepOutputs, float]], now_s: float) -> OutputBatch:
        """Merge several steps' outputs for one client into a batch without a load.

        Args:
            steps: (outputs, time at which they were made) of each step, on the clock of `now_s`.
        """
        batch = OutputBatch()
        for step, made_s in steps:
            batch.steps.append((len(step.token_ids), now_s - made_s, step.duration_s))
            batch.append(step)
        batch.seq_ids = b"".join(step.seq_ids.tobytes() for step, _ in steps)
        batch.token_ids = b"".join(step.token_ids.tobytes() for step, _ in steps)
        return batch
