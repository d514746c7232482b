"""transformers, an optional dependency, which is imported when a model needs it."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def library(submodule: str = "") -> Any:
    """Return transformers, or one of its modules."""
    return import_module(f"transformers.{submodule}" if submodule else "transformers")
