"""Requests whose constraints the workers are compiling, so that no step has to wait for that.

It only saves time: a worker that gets a constrained request which it wasn't told of compiles within the step.
"""

from __future__ import annotations

import time

from raycore.executor.base import Executor, Pending
from raycore.structured_outputs import StructuredOutputsParams

HOLD_TIMEOUT_S = 30.0
"""A request that was held this long is run: its workers say what ails its constraint."""


class GrammarsUnderWay:
    """By the seq_ids of the requests that are held for them. Asks all workers, and waits for none."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._new: dict[int, StructuredOutputsParams] = {}
        """What the workers have yet to be told of."""
        self._deadlines_s: dict[int, float] = {}
        self._answer: Pending[list[list[int]]] | None = None
        """What each worker has not done, as of the last time they were asked."""

    def __bool__(self) -> bool:
        return bool(self._deadlines_s)

    def add(self, seq_id: int, asked: StructuredOutputsParams) -> None:
        """Have the workers compile it."""
        self._new[seq_id] = asked
        self._deadlines_s[seq_id] = time.monotonic() + HOLD_TIMEOUT_S

    def drop(self, seq_id: int) -> None:
        """Nobody waits for it any more; there may be no such request."""
        self._new.pop(seq_id, None)
        self._deadlines_s.pop(seq_id, None)

    def take_done(self) -> list[int]:
        """The requests that need not be held any longer, each once."""
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
