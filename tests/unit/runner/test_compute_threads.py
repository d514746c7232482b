"""How many threads compute a step, from what is known of waiting threads and of other processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from raycore.node.cpu_time import ThreadWaits
from raycore.runner.compute_threads import ComputeThreads, ThreadController


class Waits(ThreadWaits):
    """Those that a function tells."""

    def __init__(self, new_s: Callable[[], float]) -> None:
        self.new_s = new_s
        self.num_read_all = 0

    def read_all(self) -> None:
        self.num_read_all += 1


class Machine:
    """A machine with four cores, of which other processes use `others`. A thread too many waits all the time."""

    def __init__(self, others: float = 0.0, *, is_known: bool = True) -> None:
        self.others = others
        self.now_s = 0.0
        self._is_known = is_known
        self._waited_s = 0.0
        self.controller = ThreadController(
            4, 4, waits=Waits(self._new_waits_s), cores_used_by_others=self._used, clock=lambda: self.now_s
        )

    def step(self, seconds: float = 0.2) -> int:
        """A step of so many seconds. Returns how many threads the next one uses."""
        self.now_s += seconds
        self._waited_s += seconds * max(0.0, self.controller.num_threads + self.others - 4)
        return self.controller.note(seconds)

    def _new_waits_s(self) -> float:
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def _used(self) -> float | None:
        return self.others if self._is_known else None


def test_a_step_on_a_quiet_machine_uses_all_threads():
    machine = Machine(others=0.1)
    assert {machine.step() for _ in range(50)} == {4}


@pytest.mark.parametrize(("others", "num_threads"), [(1.0, 3), (2.0, 2), (3.0, 1), (8.0, 1)])
def test_cores_used_by_other_processes_are_left_to_them(others: float, num_threads: int):
    machine = Machine(others)
    for _ in range(4):
        machine.step()
    assert {machine.step() for _ in range(50)} == {num_threads}


def test_threads_are_added_again_when_cores_are_free():
    machine = Machine(others=2.0)
    for _ in range(10):
        machine.step()
    assert machine.controller.num_threads == 2
    machine.others = 0.0
    for _ in range(20):
        machine.step()
    assert machine.controller.num_threads == 4


def test_threads_are_added_ever_less_often_if_others_then_need_the_cores():
    machine = Machine()
    # others compute whenever there are four threads, and seem to be idle otherwise
    counts: list[int] = []
    for _ in range(500):
        machine.others = 1.0 if machine.controller.num_threads == 4 else 0.0
        counts.append(machine.step())
    assert counts.count(4) < 15
    assert counts[-50:].count(4) <= 1


def test_the_use_of_cores_between_steps_does_not_count():
    waited_s, used, now_s = 0.2, 0.0, 0.0

    def cores_used() -> float:
        nonlocal used
        since, used = used, 0.0
        return since

    controller = ThreadController(
        2, 2, waits=(waits := Waits(lambda: waited_s)), cores_used_by_others=cores_used, clock=lambda: now_s
    )
    assert controller.note(0.2) == 1
    waited_s = 0.0
    for _ in range(5):
        used, now_s = 2.0, now_s + 1.0
        assert controller.note(0.2) == 1
    used, now_s = 2.0, now_s + 1.0
    controller.resume()
    assert waits.num_read_all == 0
    assert controller.note(0.2) == 2
    assert waits.num_read_all == 1, "the thread that is added wasn't read"


def test_no_thread_is_added_if_the_use_of_cores_is_unknown():
    machine = Machine(others=1.0, is_known=False)
    for _ in range(10):
        machine.step()
    machine.others = 0.0
    assert {machine.step() for _ in range(50)} == {3}


def test_short_steps_are_measured_together():
    machine = Machine(others=1.0)
    assert [machine.step(0.04) for _ in range(3)] == [4, 4, 3]


@pytest.fixture
def torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("torch_threads")
def test_the_time_between_steps_does_not_count(monkeypatch: pytest.MonkeyPatch):
    noted: list[float] = []
    monkeypatch.setattr(ThreadController, "note", lambda self, in_step_s: noted.append(in_step_s) or 2)
    threads = ComputeThreads(2)
    threads.begin_step(64, 1 << 25)
    threads.end_step()
    threads.end_step()  # of a step without tokens
    threads.begin_step(1, 1 << 10)
    threads.end_step()
    assert len(noted) == 1


@pytest.mark.usefixtures("torch_threads")
def test_the_thread_controller_resumes_after_a_pause_between_steps(monkeypatch: pytest.MonkeyPatch):
    now_s, resumed_s = 100.0, list[float]()
    monkeypatch.setattr("raycore.runner.compute_threads.time.perf_counter", lambda: now_s)
    monkeypatch.setattr(ThreadController, "resume", lambda self: resumed_s.append(now_s))
    threads = ComputeThreads(2)
    for passed_s in (0.0, 0.001, 1.0):
        now_s += passed_s
        threads.begin_step(64, 1 << 25)
        threads.end_step()
    assert resumed_s == [100.0, now_s]


@pytest.mark.usefixtures("torch_threads")
def test_a_long_step_changes_its_number_of_threads_while_it_runs(monkeypatch: pytest.MonkeyPatch):
    best = iter([2, 1, 1, 2])
    monkeypatch.setattr(ThreadController, "note", lambda self, in_step_s: next(best))
    threads = ComputeThreads(2)
    threads.begin_step(64, 1 << 25)
    found: list[int] = []
    for _ in range(3):
        threads.adapt()
        found.append(torch.get_num_threads())
    assert found == [2, 1, 1]
    threads.end_step()
    threads.begin_step(64, 1 << 25)
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("torch_threads")
def test_small_steps_use_one_thread():
    threads = ComputeThreads(2, is_fixed=True)
    for num_tokens, num_weights, num_cached, expected in (
        (1, 1 << 20, 0, 1),
        (64, 1 << 20, 0, 2),
        (1, 1 << 25, 0, 2),
        (16, 1 << 20, 1 << 18, 1),
        (16, 1 << 20, 1 << 22, 2),
    ):
        threads.begin_step(num_tokens, num_weights, num_cached)
        assert torch.get_num_threads() == expected
        threads.end_step()
