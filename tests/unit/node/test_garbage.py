"""What is loaded is no longer the collector's business. In a process of its own: this one goes on without."""

from __future__ import annotations

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
