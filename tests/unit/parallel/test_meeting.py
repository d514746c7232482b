"""Workers that meet, each a thread of this process: what they tell each other, and what they hear of failures."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from raycore.node.listeners import claim, offer
from raycore.parallel import meeting
from raycore.parallel.meeting import Meeting, PeerFailed

HOST = "127.0.0.1"
LONG_S = 600.0
"""A time-out that no test reaches: what ends before has heard of the failure."""


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "GRACE_S", 0.0)


def on_every_worker(size: int, work: Callable[[Meeting, int], Any], timeout_s: float = LONG_S) -> list[Any]:
    """What `work` returns, or raises, on each of `size` workers."""
    address = offer(HOST)

    def run(rank: int) -> Any:
        member = Meeting(address, rank, size, timeout_s)
        try:
            return work(member, rank)
        except OSError as error:
            return error
        finally:
            member.leave()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def test_workers_hear_what_others_tell_before_and_after_they_come() -> None:
    address = offer(HOST)
    first = Meeting(address, 0, 2, LONG_S)
    first.set("told", "before")
    second = Meeting(address, 1, 2, LONG_S)
    second.set("answer", "after")
    assert (second.get("told"), first.get("answer")) == (b"before", b"after")
    second.leave()
    first.leave()


def test_a_worker_that_fails_ends_the_waits_of_all_others() -> None:
    def work(member: Meeting, rank: int) -> None:
        member.set(f"came/{rank}", "")
        if rank == 2:
            for other in range(4):
                member.get(f"came/{other}")
            member.fail("ValueError: no luck")
        member.get("what nobody tells")

    found = on_every_worker(4, work)
    assert [type(error) for error in found] == [PeerFailed] * 4
    assert {str(error) for error in found} == {"worker 2 failed: ValueError: no luck"}


def test_a_cause_that_names_a_file_outside_utf8_is_told() -> None:
    address = offer(HOST)
    leader, other = (Meeting(address, rank, 2, LONG_S) for rank in range(2))
    other.fail("OSError: /models/\udcff")
    with pytest.raises(PeerFailed, match=r"worker 1 failed: OSError: /models/\?"):
        leader.get("what nobody tells")
    for member in (other, leader):
        member.leave()


@pytest.mark.parametrize("failing", [0, 1])
def test_workers_that_come_later_hear_of_a_failure(failing: int) -> None:
    """One that fails before the others are there only tells them."""
    address = offer(HOST)
    Meeting(address, failing, failing + 1, LONG_S, "dp0 tp7").fail("OSError: no memory")
    other = Meeting(address, 1 - failing, 2, LONG_S)
    with pytest.raises(PeerFailed, match="dp0 tp7 failed: OSError: no memory"):
        other.get("what nobody tells")


@pytest.mark.parametrize("failing", [0, 1])
def test_a_worker_whose_process_ends_is_named(failing: int) -> None:
    script = """
import sys
from raycore.node.listeners import offer
from raycore.parallel.meeting import Meeting
rank = int(sys.argv[1])
address = sys.argv[2] if rank else offer("127.0.0.1")
print(address, flush=True)
member = Meeting(address, rank, 2, 60, f"dp0 tp{rank}")
member.set("here", "yes")
sys.stdin.read()
"""
    given = [offer(HOST)] if failing else []
    command = [sys.executable, "-c", script, str(failing), *given]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        address = other.stdout.readline().strip()
        member = Meeting(address, 1 - failing, 2, 60)
        assert member.get("here") == b"yes"
        other.kill()
        with pytest.raises(PeerFailed, match="dp0 tp1 is gone" if failing else "the worker that leads at .* is gone"):
            member.get("what nobody tells")
    member.leave()


def test_a_worker_that_leaves_is_no_failure() -> None:
    def work(member: Meeting, rank: int) -> bytes:
        if rank == 2:
            member.set("came", "")
            return b""
        if rank == 1:
            member.get("came")  # else worker 0 could leave before that one has connected
            member.set("told", "yes")
        return member.get("told")

    assert on_every_worker(3, work) == [b"yes", b"yes", b""]


def test_the_end_of_the_leader_after_it_has_left_is_no_failure() -> None:
    address = offer(HOST)
    leader, other = Meeting(address, 0, 2, LONG_S), Meeting(address, 1, 2, 0.01)
    other.set("came", "")
    leader.get("came")
    leader.leave()
    while not other._is_over:
        time.sleep(0.001)
    other.check()
    other.leave()
    with pytest.raises(PeerFailed, match=r"out of reach: .*refused"):
        Meeting(address, 1, 2, LONG_S)


def test_all_waits_have_deadlines() -> None:
    address = offer(HOST)
    leader = Meeting(address, 0, 3, 0.05)
    with pytest.raises(
        TimeoutError, match=r"workers \[1, 2\] of the 3 didn't come within 0.05 s to the meeting at tcp:"
    ):
        leader.get("memory")
    other = Meeting(address, 1, 3, LONG_S)
    other.set("something else", "")
    third = Meeting(address, 2, 3, LONG_S)
    third.set("done", "")
    leader.get("done")
    with pytest.raises(TimeoutError, match=r"no worker told 'memory' within 0.05 s"):
        leader.get("memory")
    other.leave()
    third.leave()
    leader.leave()
    # where a process listens that never answers
    silent = offer(HOST)
    with pytest.raises(TimeoutError, match=r"workers \[0, 1\] .* didn't come within 0.05 s"):
        Meeting(silent, 1, 2, 0.05).get("memory")
    claim(silent).close()


def test_strangers_at_the_address_disturb_nobody() -> None:
    address = offer(HOST)
    port = int(address.rpartition(":")[2])
    leader = Meeting(address, 0, 2, LONG_S)
    for said in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b'["no message"]\n',
        b'{"type":"note","key":"\xff","value":""}\n',
        b'{"type":"left","rank":0,"more":' + b"[" * 100_000 + b"\n",
        b"x" * (meeting._MAX_UNREAD + 1),
    ):
        with socket.create_connection((HOST, port)) as stranger:
            stranger.sendall(said)
    held = socket.create_connection((HOST, port))  # says nothing, and stays
    other = Meeting(address, 1, 2, LONG_S)
    other.set("told", "yes")
    assert leader.get("told") == b"yes"
    for member in (other, leader):
        member.leave()
    held.close()


def test_a_worker_raises_after_a_while_so_that_the_failure_itself_is_reported_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(meeting, "GRACE_S", 1000.0)
    address = offer(HOST)
    leader, other = Meeting(address, 0, 2, LONG_S), Meeting(address, 1, 2, LONG_S)
    monkeypatch.setattr(meeting.time, "sleep", slept.append)
    other.fail("ValueError: no luck")
    with pytest.raises(PeerFailed):
        leader.get("what nobody tells")
    assert 0 < slept[0] <= 1000
    other.leave()
    leader.leave()


def test_only_the_process_that_offers_an_address_can_claim_it_once() -> None:
    address = offer(HOST)
    port = int(address.rpartition(":")[2])
    with pytest.raises(OSError, match="in use"), socket.create_server((HOST, port)):
        pass  # it's taken from the start
    with claim(address) as listener:
        assert listener.getsockname() == (HOST, port)
    with pytest.raises(ValueError, match="doesn't listen at"):
        claim(address)
