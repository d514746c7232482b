"""Stands for `raycore.compat.vllm` in processes that find this package on PYTHONPATH."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

_ROOT = str(Path(__file__).parents[4])

try:
    package = import_module("raycore.compat.vllm")
except ModuleNotFoundError as error:
    if error.name != "raycore":
        raise
    # a script outside of the checkout that holds raycore
    sys.path.append(_ROOT)
    package = import_module("raycore.compat.vllm")

# the import system returns what is here, so both names mean one module
sys.modules[__name__] = package
