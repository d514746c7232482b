"""What every transport promises, for each of them and each way of waiting."""

import math
import os
import threading
import time

import pytest
from waiting import LONG_S

from raycore.rpc.endpoint import TransportClosed

CAPACITY = 4096
CASES = ["adaptive", "spin", "no board", "stages", "actor calls"]


@pytest.fixture(scope="module")
def workers(ray_cluster):
    from echo_actor import EchoActor

    actors = [EchoActor.remote(), EchoActor.remote()]
    yield actors
    for actor in actors:
        ray_cluster.kill(actor)


class Link:
    """A started transport, and what its workers' serving comes to."""

    def __init__(self, ray, workers, transport, is_of_calls):
        self.transport = transport
        self.is_of_calls = is_of_calls
        for rank, worker in enumerate(workers):
            transport.accept(rank, ray.get(worker.join.remote(transport.invite(rank))))
        transport.finish_joining()
        ray.get([worker.finish_joining.remote() for worker in workers])
        self.served = transport.start()

    def send(self, message):
        self.transport.send(message, time.monotonic() + LONG_S)

    def receive(self):
        reply = self.transport.receive(time.monotonic() + LONG_S)
        assert reply is not None, "no reply in time"
        return reply


@pytest.fixture(params=CASES)
def link(request, ray_cluster, workers, monkeypatch):
    from raycore.rpc import channel
    from raycore.rpc.actor_call import ActorCallTransport
    from raycore.rpc.channel import ChannelTransport

    if request.param == "actor calls":
        transport = ActorCallTransport(workers)
    else:
        if request.param == "no board":  # as between nodes, and where there is no Linux
            monkeypatch.setattr(channel.Board, "create", lambda num_workers: None)
        nodes = ray_cluster.get([worker.node_id.remote() for worker in workers])
        window_s = math.inf if request.param == "spin" else 100e-6
        stage_size = 1 if request.param == "stages" else None
        transport = ChannelTransport(workers, nodes, CAPACITY, window_s, stage_size)
    link = Link(ray_cluster, workers, transport, request.param == "actor calls")
    yield link
    transport.close()
    assert ray_cluster.get(link.served, timeout=LONG_S) == ["closed", "closed"]


def test_every_worker_replies_in_order(link):
    for number in range(20):
        link.send(b"%d" % number)
        assert sorted(link.receive() for _ in range(2)) == [(0, b"%d" % number), (1, b"%d" % number)]


@pytest.mark.parametrize("size", [1, CAPACITY - 1, CAPACITY, CAPACITY + 1, 2 * CAPACITY, 300_001])
def test_messages_of_any_length_arrive_whole(link, size):
    message = os.urandom(size)
    link.send(message)
    assert sorted(link.receive() for _ in range(2)) == [(0, message), (1, message)]


def test_receive_returns_none_at_its_deadline_if_no_reply_came(link):
    link.send(b"silence")
    assert link.transport.receive(time.monotonic() + 0.05) is None


def test_requests_may_run_ahead_of_replies(link):
    for number in range(8):
        link.send(b"%d" % number)
    replies = [link.receive() for _ in range(16)]
    for rank in range(2):
        assert [message for sender, message in replies if sender == rank] == [b"%d" % n for n in range(8)]


def test_the_first_stage_does_not_wait_for_a_busy_last_stage(link):
    if len(getattr(link.transport, "_requests", [])) < 2:
        pytest.skip("there is only one stage")
    messages = [b"rank 1 is busy", b"taken", b"waiting", b"more"]
    for message in messages:
        link.send(message)
    replies = [link.receive() for _ in range(2 * len(messages))]
    assert replies.index((0, b"waiting")) < replies.index((1, b"rank 1 is busy"))
    for rank in range(2):
        assert [message for sender, message in replies if sender == rank] == messages


def test_a_sleeping_worker_is_woken(link):
    """The workers don't look for messages by themselves, except where nothing can wake them."""
    for _ in range(3):
        time.sleep(0.1)  # so that they sleep; others would reply as well
        link.send(b"after a pause")
        assert [link.receive()[1] for _ in range(2)] == [b"after a pause"] * 2


def test_a_waiting_worker_returns_when_its_next_task_is_due(link):
    """As a worker does whose device has finished a step, while no request comes."""
    if link.is_of_calls:
        pytest.skip("actor calls have no endpoint")
    link.send(b"due in 0.05 s")
    start = time.monotonic()
    assert sorted(link.receive() for _ in range(2)) == [(0, b"due"), (1, b"due")]
    assert time.monotonic() - start >= 0.05
    link.send(b"due in 60 s")
    link.send(b"a request")
    assert sorted(link.receive() for _ in range(2)) == [(0, b"a request"), (1, b"a request")]


def test_closing_wakes_a_waiting_receive(link):
    raised = threading.Event()

    def wait():
        with pytest.raises(TransportClosed):
            link.transport.receive(time.monotonic() + 60)
        raised.set()

    link.send(b"silence")
    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)  # so that it sleeps; an earlier close would do as well
    link.transport.close()
    assert raised.wait(LONG_S)
    thread.join()


def test_calls_on_a_closed_transport_raise_that_it_is_closed(link):
    link.transport.close()
    link.transport.close()
    with pytest.raises(TransportClosed):
        link.send(b"late")
    with pytest.raises(TransportClosed):
        link.receive()
