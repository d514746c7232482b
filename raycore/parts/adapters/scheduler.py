"""Limits how many different LoRA adapters running requests use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from raycore.messages import NO_ADAPTER
from raycore.scheduler.part import SchedulerPart, SchedulerView, Start
from raycore.scheduler.request import Request


class AdapterLimit(SchedulerPart):
    """At most `max_adapters` different ones.

    While a request waits for that, none with an adapter may begin, so that none waits forever.
    """

    order = 70

    def __init__(self, max_adapters: int) -> None:
        self._max_adapters = max_adapters
        self._num_users: Counter[int] = Counter()
        """By slot of the workers: number of running requests that use the adapter there."""
        self._waiting: list[Request] = []
        """Those that wait for an adapter to be of no more use, and with adapters behind them."""

    def attach(self, view: SchedulerView) -> None:
        self._wait_again = view.wait_again

    def may_start(self, request: Request) -> bool:
        if request.adapter == NO_ADAPTER:
            return True
        has_room = request.adapter in self._num_users or len(self._num_users) < self._max_adapters
        return has_room and not self._waiting

    def set_aside(self, start: Start) -> None:
        self._waiting.append(start.request)

    def started(self, start: Start) -> None:
        if start.request.adapter != NO_ADAPTER:
            self._num_users[start.request.adapter] += 1

    def left(self, request: Request, slot: int, *, is_over: bool) -> None:
        """Let those begin that have waited, if nobody uses the request's adapter any more."""
        adapter = request.adapter
        if adapter == NO_ADAPTER:
            return
        self._num_users[adapter] -= 1
        if not self._num_users[adapter]:
            del self._num_users[adapter]
            self._ask_again()

    def aborted(self, request: Request) -> None:
        """Let those begin that have only waited behind the request."""
        if request in self._waiting:
            self._waiting.remove(request)
            self._ask_again()

    def _ask_again(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._wait_again(waiting)

    def requests(self) -> Iterable[Request]:
        return self._waiting

    def check_integrity(self) -> None:
        assert len(self._num_users) <= self._max_adapters
        assert self._num_users or not self._waiting
