"""The deployments of a model: each replica hosts an engine and serves raycore's API."""

# ray's own types are partial:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUntypedClassDecorator=false

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from ray import serve
from starlette.types import ASGIApp

from raycore.ray_api import FromDriversCopy
from raycore.serve.config import Arguments
from raycore.serve.http_calls import HttpCall, ResponseStart
from raycore.serve.served_model import ServedModel
from raycore.server.serve_app import DEPLOYMENT, late_ingress


@serve.deployment(**DEPLOYMENT)
class Model(FromDriversCopy):
    """A replica. It is ready when its engine is. To stop it, Serve drains it and then calls `__del__`."""

    async def __init__(self, arguments: Arguments) -> None:
        """Start the engine, and return once it can serve. Raises the errors of `AsyncLLM`."""
        self._served = await ServedModel.start(arguments)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._served.app

    async def respond(self, call: HttpCall) -> AsyncGenerator[ResponseStart | bytes, None]:
        """Respond to an HTTP request that the ingress has taken."""
        async with aclosing(self._served.respond(call)) as parts:
            async for part in parts:
                yield part

    def check_health(self) -> None:
        """Raise EngineDeadError if the engine refuses requests. Serve then replaces the replica."""
        self._served.check_health()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What `QueuedTokensPolicy` reads."""
        return self._served.autoscaling_stats()

    async def __del__(self) -> None:
        if hasattr(self, "_served"):
            await self._served.shutdown()


_model: Any = Model
DirectModel = serve.deployment(**DEPLOYMENT)(late_ingress(_model.func_or_class))
"""The deployment of a model that takes requests itself. Serve wants one such deployment in an application."""
