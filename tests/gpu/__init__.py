"""Checks of what a GPU computes. `python benchmarks/gpu.py` runs them, `python -m tests.gpu.on_ray` those on Ray."""

from __future__ import annotations

import sys
from pathlib import Path

# programs find what pytest has on its path, too
_TESTS = Path(__file__).parents[1]
sys.path += [str(each) for each in (_TESTS, _TESTS / "support", _TESTS.parent / "benchmarks")]
