"""The order of requests: which request is admitted first, and which is preempted first."""

from __future__ import annotations

import heapq
from typing import Literal

from raycore.scheduler.request import Request

Policy = Literal["fcfs", "priority"]
Urgency = tuple[int, int]


class WaitingQueue:
    """The requests that wait for a slot, ordered by urgency.

    A preempted request keeps its arrival number, so it precedes requests of the same priority that arrived later. An
    aborted request stays in the heap until it reaches the top, and is skipped then.
    """

    def __init__(self, policy: Policy) -> None:
        self._by_priority = policy == "priority"
        self._heap: list[tuple[Urgency, Request]] = []
        self._num_discarded = 0
        """Aborted requests that are still in the heap."""
        self.num_tokens = 0
        """Number of tokens of all requests in the queue."""

    def __len__(self) -> int:
        return len(self._heap) - self._num_discarded

    def urgency(self, request: Request) -> Urgency:
        """Return the request's sort key. All keys are different.

        The request with the smallest key is admitted first; the running request with the largest key is preempted
        first.
        """
        return (request.priority if self._by_priority else 0, request.arrival)

    def push(self, request: Request) -> None:
        """Add a new or preempted request."""
        self.num_tokens += len(request.tokens)
        heapq.heappush(self._heap, (self.urgency(request), request))

    def peek(self) -> Request:
        """Return the most urgent request. The queue must not be empty."""
        while (request := self._heap[0][1]).is_aborted:
            heapq.heappop(self._heap)
            self._num_discarded -= 1
        return request

    def pop(self) -> Request:
        """Remove and return the most urgent request. The queue must not be empty."""
        request = self.peek()
        self.num_tokens -= len(request.tokens)
        heapq.heappop(self._heap)
        return request

    def discard(self, request: Request) -> None:
        """Remove a request that was just aborted while it was in the queue."""
        assert request.is_aborted
        self.num_tokens -= len(request.tokens)
        self._num_discarded += 1
