"""Has the workers compile requests' constraints before the requests are scheduled, so that no step has to wait.

This is only an optimization: if a scheduled request has a constraint that a worker hasn't compiled, or no longer has,
the worker compiles it within the step.
"""

from __future__ import annotations

from raycore.executor.base import Executor
from raycore.rpc.pending import Pending
from raycore.structured_outputs import StructuredOutputsParams
from raycore.system import time

GRAMMAR_TIMEOUT_S = 60.0
"""Maximum time in seconds that a request waits for its grammar. The client's check allows it 10 s of a processor.

After that, the request is scheduled, and its first step waits for the grammar for a short time or reports an error.
"""


class GrammarsUnderWay:
    """Requests that are held back until the workers have compiled their grammars. No method waits for the workers."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._new: dict[int, StructuredOutputsParams] = {}
        """Constraints that haven't been sent to the workers yet, by seq_id."""
        self._dropped: list[int] = []
        """The seq_ids of requests that have left, which haven't been sent to the workers yet."""
        self._deadlines_s: dict[int, float] = {}
        self._answer: Pending[list[list[int]]] | None = None
        """The reply to the last `prepare_grammars` call: for each worker, the seq_ids whose grammars aren't ready."""

    def __bool__(self) -> bool:
        """Whether a request waits, or the workers have to be told that one has left."""
        return bool(self._deadlines_s or self._dropped)

    def __contains__(self, seq_id: int) -> bool:
        """Whether a request waits for its grammar."""
        return seq_id in self._deadlines_s

    def add(self, seq_id: int, asked: StructuredOutputsParams) -> None:
        """Have the workers compile `asked`, the constraint of the request `seq_id`."""
        self._new[seq_id] = asked
        self._deadlines_s[seq_id] = time.monotonic() + GRAMMAR_TIMEOUT_S

    def drop(self, seq_id: int) -> None:
        """Note that a request has left. If it waits for its grammar, the workers needn't compile it any more. Unknown
        seq_ids are ignored."""
        is_sent = self._new.pop(seq_id, None) is None
        if self._deadlines_s.pop(seq_id, None) is not None and is_sent:
            self._dropped.append(seq_id)

    def take_done(self) -> list[int]:
        """Remove and return the seq_ids whose grammars are ready on all workers, or that have waited too long."""
        if not self:
            return []
        now_s = time.monotonic()
        done = {seq_id for seq_id, deadline_s in self._deadlines_s.items() if now_s > deadline_s}
        answer = self._answer = self._answer or self._ask()
        if answer.done():
            under_way = {seq_id for each in answer.result() for seq_id in each}
            self._answer = None
            done |= self._deadlines_s.keys() - under_way - self._new.keys()
        for seq_id in done:
            self._new.pop(seq_id, None)
            del self._deadlines_s[seq_id]
        return sorted(done)

    def _ask(self) -> Pending[list[list[int]]]:
        new, self._new = self._new, {}
        dropped, self._dropped = self._dropped, []
        return self._executor.collective_rpc("prepare_grammars", args=(new, dropped), non_block=True)
