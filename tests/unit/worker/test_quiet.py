"""An idle process's main thread rests, and a ring ends that."""

from __future__ import annotations

import subprocess
import sys

PROCESS = """
import sys, threading, time
from raycore.worker import quiet

print(quiet.install(), flush=True)
gaps = []

def note():
    last = time.monotonic()
    while len(gaps) < {looks}:
        time.sleep(0.01)
        now = time.monotonic()
        gaps.append(now - last)
        last = now

threading.Timer(0.05, quiet.rest, [{rest_s}]).start()
note()
print(max(gaps), flush=True)
"""


def longest_gap_s(rest_s: float, looks: int, ring_after_s: float | None) -> float:
    """How long the main thread of a process that is told to rest was away."""
    from time import sleep

    from raycore.worker.quiet import Ringer

    script = PROCESS.format(rest_s=rest_s, looks=looks)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        if ring_after_s is not None:
            sleep(ring_after_s)
            Ringer().ring(name)
        return float(process.stdout.readline())


def test_the_main_thread_rests_for_as_long_as_it_is_told():
    assert 0.3 <= longest_gap_s(rest_s=0.3, looks=10, ring_after_s=None) < 5


def test_a_ring_ends_the_rest():
    assert longest_gap_s(rest_s=20, looks=10, ring_after_s=0.3) < 10


def test_nobody_needs_to_be_there_to_be_rung_for():
    from raycore.worker.quiet import Ringer

    Ringer().ring("raycore-rest-of-nobody")
