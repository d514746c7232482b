"""The shared page, the bells, and the ways of waiting, between threads of one process."""

import math
import os
import sys
import threading
import time

import pytest
from waiting import LONG_S, eventually

from raycore.config.parallel import MAX_STAGES
from raycore.rpc import doorbell
from raycore.rpc.doorbell import REPLIES, REQUESTS, Bell, Board, BoardAddress, Waiter

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="boards exist on Linux only")
FOREVER_S = 1e4


@pytest.fixture
def board():
    created = Board.create(3)
    assert created is not None
    board, fd = created
    yield board, BoardAddress(os.getpid(), fd, board.token, 3)
    os.close(fd)


def test_both_sides_of_a_board_share_its_memory(board):
    ours, address = board
    theirs = Board.open(address)
    ours.raise_counter(REQUESTS)
    theirs.raise_counter(REPLIES + 2)
    assert theirs.memory[REQUESTS] == 1
    assert ours.memory[ours.replies] == b"\0\0\1"


def test_a_board_has_a_counter_for_the_channel_to_each_stage():
    assert REQUESTS + MAX_STAGES <= REPLIES


def test_a_counter_starts_again_after_255(board):
    ours, _ = board
    for _ in range(257):
        ours.raise_counter(REQUESTS)
    assert ours.memory[REQUESTS] == 1


@pytest.mark.parametrize(
    "changes", [{"pid": 2**22 + 1}, {"fd": 10**6}, {"token": b"0" * 16}, {"num_workers": 10_000}], ids=str
)
def test_a_file_with_another_identity_is_not_opened_as_the_board(board, changes):
    assert Board.open(board[1]._replace(**changes)) is None


def test_a_file_that_is_no_board_is_not_opened(board, tmp_path):
    with (tmp_path / "file").open("wb+") as file:
        file.truncate(4096)
        assert Board.open(board[1]._replace(fd=file.fileno())) is None


@pytest.fixture
def bells(board):
    bells = [Bell(board[0], member) for member in range(4)]
    yield bells
    for bell in bells:
        bell.close()


class Flag:
    """Something to look for."""

    def __init__(self):
        self.found = None

    def look(self):
        return self.found


@pytest.fixture
def only_rings_wake(monkeypatch):
    """Who sleeps doesn't look for messages by itself."""
    for name in ("FIRST_NAP_S", "LONGEST_NAP_S"):
        monkeypatch.setattr(doorbell, name, FOREVER_S)


@pytest.mark.usefixtures("only_rings_wake")
@pytest.mark.parametrize("window_s", [0.0, 100e-6, float("inf")])
def test_a_wait_returns_the_value_found_after_the_bell_rings(bells, board, window_s):
    flag = Flag()

    def put():
        if window_s < 1:
            eventually(lambda: board[0].memory[board[0].sleeper(3)])
        flag.found = "it"
        bells[0].ring(3)

    thread = threading.Thread(target=put)
    thread.start()
    assert Waiter(window_s, bells[3], must_poll=False).wait(flag.look, time.monotonic() + FOREVER_S) == "it"
    thread.join()


@pytest.mark.parametrize("has_bell", [True, False])
def test_a_wait_ends_at_its_deadline(bells, has_bell):
    waiter = Waiter(100e-6, bells[1] if has_bell else None, must_poll=not has_bell)
    start = time.monotonic()
    assert waiter.wait(Flag().look, start + 0.05) is None
    assert time.monotonic() - start >= 0.05


def test_a_wait_past_its_deadline_returns_a_value_that_is_there_already():
    assert Waiter(0.0, None, must_poll=True).wait(lambda: "it", time.monotonic() - 1) == "it"


def test_a_wait_raises_the_error_of_its_look(bells):
    def look():
        raise KeyError("closed")

    with pytest.raises(KeyError):
        Waiter(0.0, bells[1], must_poll=False).wait(look, time.monotonic() + FOREVER_S)


def test_a_sleeper_looks_less_and_less_often(bells):
    """So it uses no processor. It looks twice in each nap, and naps get twice as long."""
    num_looks = 0

    def look():
        nonlocal num_looks
        num_looks += 1

    Waiter(0.0, bells[1], must_poll=False).wait(look, time.monotonic() + 0.3)
    assert num_looks < 2 * math.log2(0.3 / doorbell.FIRST_NAP_S) + 10


def test_a_bell_rings_only_for_a_sleeping_receiver(bells, board):
    bells[0].ring(1)
    bells[1]._socket.setblocking(False)
    with pytest.raises(BlockingIOError):
        bells[1]._socket.recv(1)
    board[0].memory[board[0].sleeper(1)] = 1
    bells[0].ring(1)
    bells[2].ring(1)  # it has been rung
    assert bells[1]._socket.recv(1) == b""
    with pytest.raises(BlockingIOError):
        bells[1]._socket.recv(1)


def test_ringing_a_bell_that_is_gone_is_ignored(bells):
    assert bells[0].knock(1)
    bells[1].close()
    assert not bells[0].knock(1)


@pytest.mark.usefixtures("only_rings_wake")
def test_closing_wakes_the_sleeper(bells, board):
    flag = Flag()
    waiter = Waiter(0.0, bells[1], must_poll=False)
    thread = threading.Thread(target=waiter.wait, args=(flag.look, time.monotonic() + FOREVER_S), daemon=True)
    thread.start()
    eventually(lambda: board[0].memory[board[0].sleeper(1)])
    flag.found = "closed"
    bells[1].close()
    thread.join(LONG_S)
    assert not thread.is_alive()
