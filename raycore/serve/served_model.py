"""An engine and its server in a replica. `Model` and `RaycoreServer` are what Ray Serve sees of it."""

# ray's own types are partial:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI
from ray import serve
from starlette.types import ASGIApp, Receive, Scope, Send

from raycore.errors import InvalidInput
from raycore.llm import AsyncLLM
from raycore.parts.adapters.client import AdapterChecks
from raycore.parts.adapters.serve import DynamicAdapters
from raycore.serve.autoscaling import QUEUED_TOKENS
from raycore.serve.config import Arguments
from raycore.serve.http_calls import HttpCall, ResponseStart, respond
from raycore.server.app import build_app
from raycore.server.http.bodies import end_long_bodies
from raycore.server.http.error_bodies import error_body
from raycore.server.http.errors import APIError, as_api_error
from raycore.server.http.request_ids import RequestIds
from raycore.server.http.streaming import JSON
from raycore.server.middleware.checks import KeyCheck
from raycore.server.options import ServerOptions
from raycore.server.serve_app import check_engine, start_engine
from raycore.short_tracebacks import ends_traceback


class _QuietLLM(AsyncLLM):
    """An engine whose metrics Ray doesn't export."""

    _exports_metrics = False


class ServedModel:
    """A running engine, its ASGI application, and the adapters that requests name."""

    def __init__(
        self, engine: AsyncLLM, app: FastAPI, options: ServerOptions, adapters: DynamicAdapters | None
    ) -> None:
        """Use `start`."""
        self.engine = engine
        self.app = app
        """Requests of Serve's multiplexing load the adapters that they name."""
        self._adapters = adapters
        if adapters is not None:
            app.add_middleware(LoadedAdapter, adapters=adapters)
            # before an adapter is loaded, and again before all others' middleware
            app.add_middleware(KeyCheck, options=options)
            app.add_middleware(RequestIds, returns=False)

    @classmethod
    @ends_traceback  # Serve logs it, several times
    async def start(cls, arguments: Arguments) -> ServedModel:
        """Start the engine, and return once it can serve. Raises the errors of `AsyncLLM`."""
        make = AsyncLLM if arguments.exports_metrics else _QuietLLM
        engine, options, own = await start_engine(arguments.server, arguments.engine, make)
        try:
            adapters = None
            if arguments.lora is not None:
                checks = AdapterChecks(engine.config.model.spec, engine.config.lora)
                multiplexed: Any = serve.multiplexed(
                    max_num_models_per_replica=arguments.lora.max_num_adapters_per_replica
                )
                adapters = DynamicAdapters(own, options.served_model_names[0], arguments.lora, checks, multiplexed)
            app = build_app(engine, options, adapters or own, returns_request_ids=False)
            return cls(engine, app, options, adapters)
        except BaseException:
            await asyncio.to_thread(engine.shutdown)
            raise

    async def respond(self, call: HttpCall) -> AsyncGenerator[ResponseStart | bytes, None]:
        """Respond to an HTTP request: see `http_calls.respond`."""
        async with aclosing(respond(self.app, call)) as parts:
            async for part in parts:
                yield part

    def check_health(self) -> None:
        """Raise EngineDeadError if the engine refuses requests. Serve then replaces the replica."""
        check_engine(self.engine)

    def autoscaling_stats(self) -> dict[str, float]:
        """What `QueuedTokensPolicy` reads."""
        return {QUEUED_TOKENS: float(self.engine.num_queued_tokens)}

    async def shutdown(self) -> None:
        """End the engine's processes. Idempotent."""
        if self._adapters is not None:
            await asyncio.to_thread(self._adapters.close)
        end_long_bodies(self.app)  # calls of a router run no lifespan
        await asyncio.to_thread(self.engine.shutdown)


class LoadedAdapter:
    """Middleware that loads the adapter for which Serve's multiplexing has chosen this replica."""

    def __init__(self, app: ASGIApp, adapters: DynamicAdapters) -> None:
        self._app = app
        self._adapters = adapters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = serve.get_multiplexed_model_id() if scope["type"] == "http" else ""
        if not name:
            await self._app(scope, receive, send)
            return
        has_begun = False
        try:
            async with self._adapters.offering(name):
                has_begun = True
                await self._app(scope, receive, send)
        except (APIError, InvalidInput) as error:
            if has_begun:
                raise
            told = as_api_error(error)
            await JSON(error_body(told, scope), told.status)(scope, receive, send)
