"""The phases of a start are noted in the order in which they end, and of a process only the latest ones are kept."""

from __future__ import annotations

import time

from raycore.rpc.start_phases import note_process, phase, phases_so_far, process_start


@phase("load")
def load(number: int) -> int:
    """Loads."""
    return number + 1


def test_phases_are_noted_with_their_times():
    before_s = time.time()
    assert load(1) == 2
    assert load.__doc__ == "Loads."
    with phase("warm up"):
        time.sleep(0.01)
    first, second = phases_so_far("a worker")[-2:]
    assert (first.name, second.name) == ("load", "warm up")
    assert before_s - 1 < first.begun_s <= second.begun_s
    assert 0 <= first.duration_s < 10
    assert 0.01 <= second.duration_s < 10


def test_a_process_has_begun_some_time_ago():
    (began,) = process_start()
    assert 0 < time.time() - began.begun_s < 24 * 3600
    assert abs(began.begun_s + began.duration_s - time.time()) < 5
    note_process()
    assert phases_so_far()[-1].name == "process start"


def test_only_the_latest_phases_are_kept():
    for number in range(100):
        load(number)
    assert len(phases_so_far()) < 50
