"""Has the workers compile the constraints of requests before they are scheduled, so that no step waits for it.

This is only an optimisation: a worker that gets a constraint without notice compiles it within the step.
"""

from __future__ import annotations

import time

from raycore.executor.base import Executor, Pending
from raycore.structured_outputs import StructuredOutputsParams

HOLD_TIMEOUT_S = 30.0
"""How long a request waits for its grammar. After that it is scheduled; its step then compiles, or reports an error."""


class GrammarsUnderWay:
    """The held requests whose grammars are being compiled. Asks all workers without waiting for them."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._new: dict[int, StructuredOutputsParams] = {}
        """By seq_id: constraints that have yet to be sent to the workers."""
        self._deadlines_s: dict[int, float] = {}
        self._answer: Pending[list[list[int]]] | None = None
        """The pending reply to the last question: for each worker, the seq_ids whose grammars aren't ready."""

    def __bool__(self) -> bool:
        return bool(self._deadlines_s)

    def add(self, seq_id: int, asked: StructuredOutputsParams) -> None:
        """Have the workers compile the constraint of a request."""
        self._new[seq_id] = asked
        self._deadlines_s[seq_id] = time.monotonic() + HOLD_TIMEOUT_S

    def drop(self, seq_id: int) -> None:
        """Stop waiting for a request's grammar. Unknown seq_ids are ignored."""
        self._new.pop(seq_id, None)
        self._deadlines_s.pop(seq_id, None)

    def take_done(self) -> list[int]:
        """Remove and return the requests whose grammars are ready, or that have waited too long."""
        if not self._deadlines_s:
            return []
        now_s = time.monotonic()
        done = {seq_id for seq_id, deadline_s in self._deadlines_s.items() if now_s > deadline_s}
        answer = self._answer = self._answer or self._ask()
        if answer.done():
            under_way = {seq_id for each in answer.result() for seq_id in each}
            self._answer = None
            done |= self._deadlines_s.keys() - under_way - self._new.keys()
        for seq_id in done:
            self.drop(seq_id)
        return sorted(done)

    def _ask(self) -> Pending[list[list[int]]]:
        new, self._new = self._new, {}
        return self._executor.collective_rpc("prepare_grammars", args=(new,), non_block=True)
