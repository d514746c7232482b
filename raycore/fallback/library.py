"""transformers, an optional dependency, which is imported when a model needs it."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from raycore.extras import needing

_asking = threading.Lock()
"""Two traces at a time would leave torch with the function of one of them."""


def library(submodule: str = "") -> Any:
    """Return transformers, or one of its modules."""
    with needing("transformers' models need", "transformers"):
        return import_module(f"transformers.{submodule}" if submodule else "transformers")


@contextmanager
def autocast_is_off_on_meta() -> Generator[None]:
    """Versions of transformers before 5.4 ask whether autocast is on for `meta`, which torch refuses to say."""
    try:
        library("utils.generic").maybe_autocast("meta", enabled=False)
    except RuntimeError:
        with _asking, _answered_for_meta():
            yield
    else:
        yield


@contextmanager
def _answered_for_meta() -> Generator[None]:
    namespace: Any = torch
    asked = namespace.is_autocast_enabled

    def is_on(*args: Any, **kwargs: Any) -> bool:
        return args != ("meta",) and asked(*args, **kwargs)

    namespace.is_autocast_enabled = is_on
    try:
        yield
    finally:
        namespace.is_autocast_enabled = asked
