"""Engines that are disturbed while requests run: by faults, and by pauses and sleeps.

Programs run as `python -m tests.chaos.NAME`.
"""

from __future__ import annotations

import sys
from pathlib import Path

# programs find what pytest has on its path, too
_TESTS = Path(__file__).parents[1]
sys.path += [str(each) for each in (_TESTS, _TESTS / "support", _TESTS.parent / "benchmarks")]
