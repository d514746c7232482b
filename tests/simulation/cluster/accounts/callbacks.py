"""Callbacks of calls to workers, as those have who write an executor or a loop of their own: each is called once."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

from raycore.rpc.client import RpcClient, SentCall
from simulation.cluster.accounts.account import Account, Run

_SHARE = 0.1
"""Of the scenarios in which calls have callbacks."""


class Callbacks(Account):
    """See the module."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        global _account
        has_any = random.Random(f"callbacks {run.scenario.seed}").random() < _SHARE
        _account = self if has_any else None
        self._calls: dict[SentCall[Any], int] = {}
        """How often each has called back."""

    def add(self, call: SentCall[Any]) -> None:
        self._calls[call] = 0
        call.add_done_callback(self._called_back)

    def _called_back(self, call: SentCall[Any]) -> None:
        self._calls[call] += 1
        if not call.is_complete:
            self.problems.append(f"{call.what}, call {call.number}, has called back before it was complete")

    def over(self) -> Iterator[str]:
        wrong = Counter(
            f"{call.what} has called back {count} times" for call, count in self._calls.items() if count > 1
        )
        yield from (f"{said}, in {number} calls" for said, number in wrong.items())


_account: Callbacks | None = None
"""That of the present run, if calls have callbacks in it."""
_original = RpcClient._send


def _send(self: RpcClient, *args: Any, **kwargs: Any) -> Any:
    call = _original(self, *args, **kwargs)
    if _account is not None:
        _account.add(call)
    return call


RpcClient._send = _send
