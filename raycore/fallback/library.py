"""transformers, an optional dependency, which is imported when a model needs it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from raycore.extras import needing


def library(submodule: str = "") -> Any:
    """Return transformers, or one of its modules."""
    with needing("transformers' models need", "transformers"):
        return import_module(f"transformers.{submodule}" if submodule else "transformers")
