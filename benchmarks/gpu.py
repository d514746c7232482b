"""Checks raycore on a GPU, and measures it there. `tests/gpu/command.py` describes it, and has its options.

python benchmarks/gpu.py --out results/gpu.md
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from gpu.command import main

if __name__ == "__main__":
    sys.exit(main())
