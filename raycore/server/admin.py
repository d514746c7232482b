"""Paths that control the engine. They are served only with the option `enable_admin_endpoints`.

Paths, query parameters and responses are vLLM's.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Query
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from raycore.server.generation import AdminEngine
from raycore.server.openapi.document import responses
from raycore.server.openapi.response_models import Success
from raycore.server.streaming import JSON

_ERRORS = (400, 401, 500, 503)


class StartProfileRequest(BaseModel):
    """The optional body of /start_profile: see `LLM.start_profile`."""

    model_config = ConfigDict(strict=True)

    profile_prefix: str | None = None
    delay_iterations: int | None = None
    max_iterations: int | None = None


def add_admin_endpoints(app: FastAPI, engine: AdminEngine) -> None:
    """Add the paths to the application."""

    @app.post("/reset_prefix_cache", responses=responses(Success, *_ERRORS))
    async def reset_prefix_cache(
        reset_running_requests: Annotated[bool, Query()] = False, reset_external: Annotated[bool, Query()] = False
    ) -> Response:
        """Clear the prefix cache. It isn't cleared on ranks with running requests, unless these are reset, too."""
        return JSON({"success": await engine.reset_prefix_cache(reset_running_requests, reset_external)})

    @app.post("/start_profile", responses=responses(None, *_ERRORS))
    async def start_profile(body: StartProfileRequest | None = None) -> Response:
        """Start a profile of all ranks' steps. The engine needs the option `profiler_config`."""
        asked = body or StartProfileRequest()
        await engine.start_profile(asked.profile_prefix, asked.delay_iterations, asked.max_iterations)
        return Response()

    @app.post("/stop_profile", responses=responses(None, *_ERRORS))
    async def stop_profile() -> Response:
        """End the profile, and respond when its files are written."""
        await engine.stop_profile()
        return Response()
