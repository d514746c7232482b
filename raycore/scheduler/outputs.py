"""The outputs of one step. They can be split by client, and merged with outputs of other steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from raycore.messages import FIRST_WEIGHTS, OutputBatch, SequenceEvents, WeightVersion, client_of

if TYPE_CHECKING:
    from numpy.typing import NDArray


class StepOutputs(SequenceEvents, eq=False):
    """One step's outputs. The arrays are read-only, because the scheduler may still use them."""

    seq_ids: NDArray[np.int64] = np.empty(0, np.int64)
    """int64[k]: `seq_ids[i]` is the sequence that got `token_ids[i]`. A sequence that got several tokens occurs as
    often, without others between."""
    token_ids: NDArray[np.int32] = np.empty(0, np.int32)
    """int32[k]: the new tokens."""
    duration_s: float = 0.0
    """Seconds from the planning of the step to the arrival of its result. The engine sets this field, `version` and
    `queued`."""
    version: WeightVersion = FIRST_WEIGHTS
    """The weights that the tokens come from."""
    flush_interval_s: float = math.inf
    """The smallest flush interval among the requests with new tokens; infinite if there is no new token."""
    only_client: int | None = None
    """The client of all sequences, if the step had only one. None: see `seq_ids`."""

    def by_client(self) -> list[tuple[int, StepOutputs]]:
        """Return (client index, outputs) for each client. If there is only one client, nothing is copied."""
        named = self.clients()
        if self.only_client is None:
            named |= set(np.unique(client_of(self.seq_ids)).tolist())
        elif len(self.seq_ids):
            named.add(self.only_client)
        if len(named) <= 1:
            return [(client, self) for client in named]
        clients = client_of(self.seq_ids)
        return [(client, self._for_client(client, clients == client)) for client in sorted(named)]

    def _for_client(self, client: int, is_its: NDArray[np.bool_]) -> StepOutputs:
        return StepOutputs(
            **self.entries_of(client),
            seq_ids=self.seq_ids[is_its],
            token_ids=self.token_ids[is_its],
            duration_s=self.duration_s,
            version=self.version,
            flush_interval_s=self.flush_interval_s,
        )

    @staticmethod
    def merge(steps: Sequence[tuple[StepOutputs, float]], now_s: float) -> OutputBatch:
        """Merge one client's outputs of several steps into a batch. The batch's load isn't set.

        Args:
            steps: (outputs, time when the outputs were made) of each step.
            now_s: the current time, on the same clock.
        """
        batch, version, num_tokens = OutputBatch(), FIRST_WEIGHTS, 0
        for step, made_s in steps:
            if step.version != version and len(step.token_ids):
                version = step.version
                batch.versions.append((num_tokens, version))
            num_tokens += len(step.token_ids)
            batch.steps.append((len(step.token_ids), now_s - made_s, step.duration_s))
            batch.append(step)
        batch.seq_ids = b"".join(step.seq_ids.tobytes() for step, _ in steps)
        batch.token_ids = b"".join(step.token_ids.tobytes() for step, _ in steps)
        return batch
