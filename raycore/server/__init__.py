"""OpenAI's API over an engine. Needs the extra `serve`."""

from raycore.server.app import build_app
from raycore.server.options import ServerOptions

__all__ = ["ServerOptions", "build_app"]
