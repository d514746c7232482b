"""The order of requests: which is admitted first, and which is preempted first."""

from __future__ import annotations

import heapq
from typing import Literal

from raycore.scheduler.request import Request

Policy = Literal["fcfs", "priority"]
Urgency = tuple[int, int]


class WaitingQueue:
    """Requests that wait for a slot, the most urgent first.

    A preempted request goes before all requests that arrived after it. An aborted request stays in the heap until it
    reaches the top, where it is skipped.
    """

    def __init__(self, policy: Policy) -> None:
        self._by_priority = policy == "priority"
        self._heap: list[tuple[Urgency, Request]] = []
        self._num_discarded = 0
        """Aborted requests that are still in the heap."""

    def __len__(self) -> int:
        return len(self._heap) - self._num_discarded

    def urgency(self, request: Request) -> Urgency:
        """The sort key: the smallest is admitted first, the largest is preempted first. No two requests have equal
        keys."""
        return (request.priority if self._by_priority else 0, request.arrival)

    def push(self, request: Request) -> None:
        """Add a request, new or preempted."""
        heapq.heappush(self._heap, (self.urgency(request), request))

    def peek(self) -> Request:
        """The most urgent request; the queue is not empty."""
        while (request := self._heap[0][1]).is_aborted:
            heapq.heappop(self._heap)
            self._num_discarded -= 1
        return request

    def pop(self) -> Request:
        """Remove and return the most urgent request; the queue is not empty."""
        request = self.peek()
        heapq.heappop(self._heap)
        return request

    def discard(self, request: Request) -> None:
        """Remove a queued request that was just aborted."""
        assert request.is_aborted
        self._num_discarded += 1
