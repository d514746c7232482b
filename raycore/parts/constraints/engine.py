"""Has requests' constraints compiled before the requests are scheduled, so that no step has to wait.

This is only an optimization: if a scheduled request has a constraint that isn't compiled, or no longer is, it is
compiled within the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from raycore.executor.base import Executor
from raycore.parts.constraints.grammar.prepared import PreparedGrammars
from raycore.rpc.pending import Finished, Pending
from raycore.structured_outputs import StructuredOutputsParams
from raycore.system import time

GRAMMAR_TIMEOUT_S = 60.0
"""Maximum time in seconds that a request waits for its grammar. The client's check allows it 10 s of a processor.

After that, the request is scheduled, and its first step waits for the grammar for a short time or reports an error.
"""


Ask = Callable[[Mapping[int, StructuredOutputsParams], Sequence[int]], Pending[list[list[int]]]]
"""Has constraints compiled, by seq_id, and those of requests that have left no longer. For each of those that compile,
the result has the seq_ids whose grammars aren't ready."""


def by_workers(executor: Executor) -> Ask:
    """Have the workers compile."""
    return lambda new, dropped: executor.collective_rpc("prepare_grammars", args=(new, dropped), non_block=True)


def here(prepared: PreparedGrammars) -> Ask:
    """Compile in the engine's process, where masks are made."""
    return lambda new, dropped: Finished([prepared.prepare(new, dropped)])


class GrammarsUnderWay:
    """Requests that are held back until their grammars have been compiled. No method waits for that."""

    def __init__(self, *asks: Ask) -> None:
        """`asks`: who compiles."""
        self._asks = asks
        self._new: dict[int, StructuredOutputsParams] = {}
        """Constraints that nobody has been asked for yet, by seq_id."""
        self._dropped: list[int] = []
        """The seq_ids of requests that have left, of which nobody has been told yet."""
        self._deadlines_s: dict[int, float] = {}
        self._answers: list[Pending[list[list[int]]]] = []
        """The answers to the last question. Empty: they have been taken."""

    def __bool__(self) -> bool:
        """Whether a request waits, or those who compile have to be told that one has left."""
        return bool(self._deadlines_s or self._dropped)

    def __contains__(self, seq_id: int) -> bool:
        """Whether a request waits for its grammar."""
        return seq_id in self._deadlines_s

    def add(self, seq_id: int, asked: StructuredOutputsParams) -> None:
        """Have `asked` compiled, the constraint of the request `seq_id`."""
        self._new[seq_id] = asked
        self._deadlines_s[seq_id] = time.monotonic() + GRAMMAR_TIMEOUT_S

    def drop(self, seq_id: int) -> None:
        """Note that a request has left. If it waits for its grammar, nobody needs that any more. Unknown seq_ids are
        ignored."""
        is_sent = self._new.pop(seq_id, None) is None
        if self._deadlines_s.pop(seq_id, None) is not None and is_sent:
            self._dropped.append(seq_id)

    def take_done(self) -> list[int]:
        """Remove and return the seq_ids whose grammars are ready everywhere, or that have waited too long."""
        if not self:
            return []
        now_s = time.monotonic()
        done = {seq_id for seq_id, deadline_s in self._deadlines_s.items() if now_s > deadline_s}
        answers = self._answers = self._answers or self._ask()
        if all(answer.done() for answer in answers):
            under_way = {seq_id for answer in answers for each in answer.result() for seq_id in each}
            self._answers = []
            done |= self._deadlines_s.keys() - under_way - self._new.keys()
        for seq_id in done:
            self._new.pop(seq_id, None)
            del self._deadlines_s[seq_id]
        return sorted(done)

    def _ask(self) -> list[Pending[list[list[int]]]]:
        new, self._new = self._new, {}
        dropped, self._dropped = self._dropped, []
        return [ask(new, dropped) for ask in self._asks]
