"""What is loaded is no longer the collector's business, and what it does is logged. In processes of their own: this one
goes on without."""

from __future__ import annotations

import re
import subprocess
import sys

PROGRAM = """
import gc
from raycore.node.garbage import freeze_heap

loaded = [[number] for number in range(10_000)]
freeze_heap("a worker")
assert gc.get_freeze_count() > 10_000, gc.get_freeze_count()
assert len(gc.get_objects()) < 1000
"""


def test_loaded_objects_are_frozen_out_of_garbage_collection() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)


LOGGED = """
import gc, logging, sys
from raycore.node.garbage import log_collections

class Knot:
    def __init__(self):
        self.own = self

gc.disable()
lines = []
class Keep(logging.Handler):
    def emit(self, record):
        lines.append((record.levelname, record.getMessage()))
logger = logging.getLogger("raycore")
logger.setLevel(logging.ERROR)
logger.addHandler(Keep())
for _ in range(2):
    log_collections("a worker", int(sys.argv[1]))
gc.collect()
for _ in range(5000):
    Knot()
gc.collect(1)
import time
while len(lines) < 2:
    time.sleep(0.01)
for each in lines:
    print(*each)
"""


def logged(num_types: int) -> list[str]:
    """The lines of a full collection, and of one that collects 5,000 objects."""
    command = [sys.executable, "-c", LOGGED, str(num_types)]
    run = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    return run.stdout.splitlines()


def test_collections_are_logged_once_each_whatever_the_level_of_other_lines() -> None:
    full, young = logged(0)
    assert full.startswith("INFO garbage collection: generation 2, ")
    found = re.fullmatch(r"INFO garbage collection: generation 1, (\d+\.\d\d) ms, (\d+) collected", young)
    assert found is not None, young
    assert float(found[1]) > 0
    assert 5000 <= int(found[2]) <= 10_100  # an object, and maybe its attributes


def test_the_most_common_types_are_named() -> None:
    _, young = logged(2)
    of = young.partition("; of ")[2]
    assert re.match(r"\d+ objects: ", of), young
    assert "Knot 5000" in of
    assert of.count(",") == 1
