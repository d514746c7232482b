"""An OpenAI-compatible HTTP API for an engine. Needs `pip install 'raycore[serve]'`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from raycore.extras import needing

if TYPE_CHECKING:
    from raycore.parts.adapters.server.adapters import load_adapters
    from raycore.server.app import build_app
    from raycore.server.options import ServerOptions

_HOMES = {
    "ServerOptions": "raycore.server.options",
    "build_app": "raycore.server.app",
    "load_adapters": "raycore.parts.adapters.server.adapters",
}

__all__ = ["ServerOptions", "build_app", "load_adapters"]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    # imported on first use: the command line needs only the options, and `--help` must be fast
    if name in _HOMES:
        with needing(f"raycore.server.{name} needs", "serve"):
            return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
