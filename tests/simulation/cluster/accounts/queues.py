"""Queues and buffers of the product: each stays short. Their lengths are looked at whenever something is added."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

from raycore.cluster.process_watch import Ends
from raycore.engine.core import EngineCore
from raycore.engine.mailbox import Mailbox, _Outbox
from simulation.cluster.accounts.account import Account, Run
from simulation.ray.objects import Stream
from simulation.world import queues

MOVES = 4
"""How often a request comes to a rank: at first, and for each time that it moves. Requests move `max_request_replays`
times, by default 3, because of failures. Moves for drains and scaling come in addition, but few in a scenario."""
FEW = 16
"""Messages that aren't requests': calls of operators, changes of activity, and clients that leave."""
GROUPS = 4
"""Groups of layers, at most."""
STEPS_IN_FLIGHT = 4
"""Steps that an executor has under way. One computes and one is planned, and a pipeline has one for each stage."""

_PIECES = ("pieces", "slow pieces")


class Queues(Account):
    """The longest that each queue was."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        global _account
        _account = self
        queues.on_put = _on_put
        requests = run.scenario.requests
        # a prompt that comes in pieces is a request for each
        numbers = [request.n * (1 + sum(len(request.wants.get(each, ())) for each in _PIECES)) for request in requests]
        num_sequences = sum(numbers)
        # each step that gives outputs gives a token, or ends a sequence. The client takes those of a lost rank never
        num_outputs = sum(n * (request.max_tokens + MOVES) for n, request in zip(numbers, requests, strict=True)) + FEW
        self.most = {
            # one submits and one aborts, as often as it comes to the rank
            "commands": 2 * MOVES * num_sequences + FEW,
            "outputs of a rank": num_outputs,
            # each batch has outputs, or tells of another load
            "batches on their way": 2 * num_outputs,
            "steps in flight": STEPS_IN_FLIGHT,
            # one of each process of a rank, or of ranks that fail together
            "ends of processes": FEW,
            # a call for each caller's prompt and constraint that another thread looks at, or a batch of figures; or
            # blocks of each group of layers, which are written to files
            "items of another queue": num_outputs * (GROUPS if "kv_transfer_config" in run.scenario.options else 1),
        }
        self.longest: Counter[str] = Counter()

    def note(self, what: str, length: int) -> None:
        """A queue has this length."""
        if length > self.longest[what]:
            self.longest[what] = length
            if length > self.most[what] and not any(each.startswith(what) for each in self.problems):
                self.problems.append(f"{what}: there are {length}, more than {self.most[what]}")


_account: Queues | None = None
"""That of the present run."""


def _on_put(queue: Any, length: int) -> None:
    if _account is not None:
        _account.note("items of another queue", length)


def _watch(owner: type[Any], method: str, what: str, length: Callable[[Any], int]) -> None:
    """Look at a queue after each call of the method that adds to it."""
    original = getattr(owner, method)

    @functools.wraps(original)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if _account is not None:
            _account.note(what, length(self))
        return result

    setattr(owner, method, watched)


_watch(Mailbox, "put", "commands", lambda mailbox: len(mailbox._commands))
_watch(_Outbox, "add", "outputs of a rank", lambda outbox: len(outbox._steps))
_watch(Stream, "add", "batches on their way", lambda stream: len(stream.items))
_watch(EngineCore, "_start_step", "steps in flight", lambda core: len(core._in_flight) + 1)
_watch(Ends, "_note_end", "ends of processes", lambda ends: len(ends._ended))
