"""Who goes first."""

import numpy as np

from raycore.sampling_params import SamplingParams
from raycore.scheduler.policy import WaitingQueue
from raycore.scheduler.request import Request


def request(arrival: int, priority: int = 0) -> Request:
    return Request(
        arrival, arrival, priority, SamplingParams(), 0, [], [], 0.0, np.zeros(1, np.int32), 1, 9, 1, frozenset()
    )


def order(queue: WaitingQueue) -> list[int]:
    return [queue.pop().arrival for _ in range(len(queue))]


def test_first_come_first_served_ignores_priority_and_puts_the_preempted_in_front() -> None:
    queue = WaitingQueue("fcfs")
    for waiting in (request(3, priority=-1), request(5), request(4), request(1)):
        queue.push(waiting)
    assert order(queue) == [1, 3, 4, 5]


def test_lower_priority_numbers_go_first() -> None:
    queue = WaitingQueue("priority")
    for waiting in (request(0, priority=2), request(1, priority=1), request(2, priority=1)):
        queue.push(waiting)
    assert order(queue) == [1, 2, 0]


def test_aborted_requests_are_skipped() -> None:
    queue = WaitingQueue("fcfs")
    requests = [request(arrival) for arrival in range(4)]
    for waiting in requests:
        queue.push(waiting)
    for gone in (requests[0], requests[2]):
        gone.is_aborted = True
        queue.discard(gone)
    assert len(queue) == 2
    assert queue.peek() is requests[1]
    assert order(queue) == [1, 3]
    assert len(queue) == 0
