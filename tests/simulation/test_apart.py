"""Work in processes of their own, and what is said of work that doesn't end."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest

from simulation.apart import Died, run_all_apart, run_apart
from simulation.putting_in import first_find
from simulation.scenario import Scenario
from simulation.world import threads
from simulation.world.kernel import World


def test_results_come_with_their_keys_from_processes_of_their_own():
    works = [(number, lambda number=number: (number**2, os.getpid())) for number in range(10)]
    found = dict(run_all_apart(works, 3, 60.0))
    assert {key: value[0] for key, value in found.items() if not isinstance(value, Died)} == {
        number: number**2 for number in range(10)
    }
    assert len({value[1] for value in found.values() if not isinstance(value, Died)} - {os.getpid()}) == 10


def test_what_is_raised_and_a_process_that_ends_are_told():
    assert "ZeroDivisionError" in str(run_apart(lambda: 1 / 0, 60.0))
    assert run_apart(lambda: os._exit(7), 60.0) == Died("its process ended with status 7 and without a result")


def test_a_wait_outside_of_the_world_is_ended_with_the_stacks_of_all_threads():
    def waits_for_what_the_world_does_not_know() -> None:
        def forgotten() -> None:
            threads.Event().wait()

        threads.Thread(target=forgotten, name="forgotten").start()
        threads.world().park("a little", 1.0)
        outside = threading.Lock()
        outside.acquire()
        signal.setitimer(signal.ITIMER_REAL, 0.1)  # its time is over soon after it has come here
        outside.acquire()

    result = run_apart(lambda: World(1).run(waits_for_what_the_world_does_not_know), 60.0)
    assert isinstance(result, Died)
    assert result.reason.startswith("not over after 60 s of real time\ndriver/main runs:\n")
    assert "outside.acquire()" in result.reason
    assert "driver/forgotten waits for an event" in result.reason
    assert "threads.Event().wait()" in result.reason


def test_a_fault_that_only_the_time_shows_is_not_found():
    def waits(_: Scenario) -> Any:
        signal.setitimer(signal.ITIMER_REAL, 0.1)  # its time is over soon
        threading.Event().wait(60.0)

    with pytest.raises(TimeoutError, match="seed 3 is not over after 120 s"):
        first_find(waits, [Scenario(seed=3)])


def test_processes_are_ended_when_nobody_wants_their_results():
    pids: list[int] = []
    reading, writing = os.pipe()

    def work() -> None:
        os.write(writing, os.getpid().to_bytes(4, "big"))
        threading.Event().wait(60.0)

    results = run_all_apart([(0, lambda: 1), (1, work), (2, work)], 3, 120.0)
    assert next(results) == (0, 1)
    pids = [int.from_bytes(os.read(reading, 4), "big") for _ in range(2)]
    results.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
