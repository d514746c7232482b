"""An OpenAI-compatible HTTP API for an engine. Needs the extra `serve`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raycore.server.app import build_app
    from raycore.server.options import ServerOptions

_HOMES = {"ServerOptions": "raycore.server.options", "build_app": "raycore.server.app"}

__all__ = ["ServerOptions", "build_app"]


def __getattr__(name: str) -> Any:
    # looked up late: the command line needs the options alone, and has to answer `--help` at once
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
