"""The two ends of a link, as threads of this process: over shared memory, and by torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from waiting import LONG_S

from raycore.node.listeners import offer
from raycore.parallel import links, peer_memory
from raycore.parallel.links import Link, SharedMemoryLink, TorchLink
from raycore.parallel.rendezvous import Rendezvous

CPU = torch.device("cpu")
SHAPE = (5, 16)
PAGE_BYTES = 4096


def make_ends(timeout_s: float = 20.0, num_ahead: int = 2) -> tuple[Link, Link]:
    """The end that sends, and the one that receives."""
    address = offer("127.0.0.1")

    def make(sends: bool) -> Link:
        workers = Rendezvous(address, int(sends), 2, CPU, timeout_s)
        return workers.link("ends", sends=sends, capacity_bytes=PAGE_BYTES, num_ahead=num_ahead)

    with ThreadPoolExecutor(2) as pool:
        sender, receiver = pool.map(make, [True, False])
    return sender, receiver


@pytest.fixture(params=["shared memory", "torch"])
def kind(request, monkeypatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(peer_memory, "_open", lambda store, num_bytes: None)
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_arrive_in_order(kind, dtype):
    sender, receiver = make_ends()
    assert {type(sender), type(receiver)} == {SharedMemoryLink if kind == "shared memory" else TorchLink}
    # of many sizes, some larger than a buffer, so that they go in pieces
    sent = [torch.randn(number * 37 % 200 + 1, 16).to(dtype) for number in range(60)]

    def send_all() -> None:
        for h_TD in sent:
            sender.send(h_TD)

    thread = threading.Thread(target=send_all)
    thread.start()
    for h_TD in sent:
        assert torch.equal(receiver.receive_into(torch.empty_like(h_TD)), h_TD)
    thread.join(LONG_S)
    assert not thread.is_alive()
    assert receiver.waited_s > 0
    for end in (sender, receiver):
        end.close()
        end.close()


@pytest.mark.parametrize("num_ahead", [2, 5])
def test_the_sending_stage_may_be_a_few_steps_ahead(kind, num_ahead):
    sender, receiver = make_ends(num_ahead=num_ahead)
    sent = [torch.full(SHAPE, float(number)) for number in range(num_ahead)]
    for h_TD in sent:
        sender.send(h_TD)  # nobody receives: a sender that waited would fail this test
    for h_TD in sent:
        assert torch.equal(receiver.receive_into(torch.empty(SHAPE)), h_TD)
    sender.close()
    receiver.close()


def test_hidden_states_sent_before_the_sender_closes_arrive(kind):
    sender, receiver = make_ends()
    sent = [torch.full(SHAPE, float(number)) for number in range(2)]
    for h_TD in sent:
        sender.send(h_TD)
    closing = threading.Thread(target=sender.close)
    closing.start()
    closing.join(0.1)  # one that doesn't wait for the receiver has closed now
    for h_TD in sent:
        assert torch.equal(receiver.receive_into(torch.empty(SHAPE)), h_TD)
    closing.join(LONG_S)
    assert not closing.is_alive()
    receiver.close()


def test_a_stuck_receiver_does_not_keep_the_sender_from_closing(kind, monkeypatch):
    monkeypatch.setattr(links, "_CLOSE_S", 0.05)
    sender, receiver = make_ends(timeout_s=600.0)
    for number in range(2):
        sender.send(torch.full(SHAPE, float(number)))
    sender.close()
    receiver.close()


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda sender, receiver: receiver.receive_into(torch.empty(SHAPE)), "other stage's .* send"),
        (lambda sender, receiver: [sender.send(torch.zeros(SHAPE)) for _ in range(3)], "other stage's .* take"),
    ],
    ids=["nobody sends", "nobody receives"],
)
def test_sending_and_receiving_hidden_states_have_a_deadline(kind, act: Callable[[Link, Link], object], message: str):
    sender, receiver = make_ends(timeout_s=0.3)
    with pytest.raises(OSError, match=message):
        act(sender, receiver)
    sender.close()
    receiver.close()


def test_a_link_raises_when_the_process_at_its_other_end_dies(monkeypatch):
    """Between nodes, the connection breaks, long before the deadline."""
    monkeypatch.setattr(peer_memory, "_open", lambda store, num_bytes: None)
    sender, receiver = make_ends()
    sender.close()
    with pytest.raises(OSError, match="other stage's"):
        receiver.receive_into(torch.empty(SHAPE))
    receiver.close()
