"""Lets `benchmarks/gpu.py` import what makes small checkpoints for the tests. Import this before those modules.

Their directory isn't added to the path: libraries would take other modules there for packages of the same names.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_DIRECTORY = Path(__file__).parents[1] / "tests" / "support"
for _name in ("tokenizers_for_tests", "encoder_checkpoints", "pooling_checkpoints", "vision_checkpoints"):
    _spec = importlib.util.spec_from_file_location(_name, _DIRECTORY / f"{_name}.py")
    assert _spec is not None
    assert _spec.loader is not None
    sys.modules[_name] = _module = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_module)
