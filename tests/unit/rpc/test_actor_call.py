"""Replies of calls whose results come in any order."""

import time
from concurrent.futures import Future
from types import SimpleNamespace

from raycore.rpc.actor_call import ActorCallTransport


class FakeWorker:
    """Its calls end when the test says so."""

    def __init__(self):
        self.calls = []
        self.call = self

    def remote(self, message):
        self.calls.append(Future())
        return self

    def future(self):
        return self.calls[-1]


def test_replies_of_a_worker_keep_the_order_of_its_requests():
    workers = [FakeWorker(), FakeWorker()]
    transport = ActorCallTransport(workers)
    for _ in range(2):
        transport.send(b"request", time.monotonic())
    (first, second), (other, _) = (worker.calls for worker in workers)
    second.set_result(b"second")
    assert transport.receive(time.monotonic()) is None
    other.set_result(b"other")
    assert transport.receive(time.monotonic()) == (1, b"other")
    first.set_result(b"first")
    assert [transport.receive(time.monotonic()) for _ in range(2)] == [(0, b"first"), (0, b"second")]


def test_two_threads_may_close_at_the_same_time(monkeypatch):
    worker = FakeWorker()
    worker.close = SimpleNamespace(remote=lambda: worker.calls.append("close"))
    transport = ActorCallTransport([worker])
    transport.close()
    monkeypatch.setattr(transport._closing, "done", lambda: False)  # asked before the other thread has closed it
    transport.close()
    assert worker.calls == ["close"]


def test_replies_of_no_worker_pile_up_while_those_of_the_first_are_always_there():
    workers = [FakeWorker(), FakeWorker()]
    transport = ActorCallTransport(workers)
    longest = 0
    for number in range(20):
        transport.send(b"step", time.monotonic())
        workers[0].calls[-1].set_result(b"%d" % number)
        workers[1].calls[-1].set_result(None)
        assert transport.receive(time.monotonic()) == (0, b"%d" % number)
        longest = max(longest, *map(len, transport._in_flight))
    assert longest == 1
