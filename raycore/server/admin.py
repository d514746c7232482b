"""Paths that control the engine. They are served only with the option `enable_admin_endpoints`.

Paths, query parameters and responses are vLLM's.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Query
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from raycore.activity import PauseMode
from raycore.server.adapters import AdapterCalls
from raycore.server.endpoints import Endpoint
from raycore.server.generation import AdminEngine
from raycore.server.openapi.document import responses
from raycore.server.openapi.response_models import Paused, Sleeping, SleepStatus, Status, Success, WakeStatus
from raycore.server.protocol import LoadLoraAdapterRequest, UnloadLoraAdapterRequest
from raycore.server.streaming import JSON

_ERRORS = (400, 401, 500, 503)
_BODY_ERRORS = (408, 413, *_ERRORS)


class StartProfileRequest(BaseModel):
    """The optional body of /start_profile: see `LLM.start_profile`."""

    model_config = ConfigDict(strict=True)

    profile_prefix: str | None = None
    delay_iterations: int | None = None
    max_iterations: int | None = None


def add_admin_endpoints(app: FastAPI, engine: AdminEngine) -> None:
    """Add the paths to the application."""

    @Endpoint.PAUSE.route(app, responses=responses(Status, *_ERRORS))
    async def pause(mode: PauseMode = "abort", clear_cache: bool = True) -> Response:
        """Pause the engine. Unfinished requests are aborted, finish first, or continue after the pause (keep)."""
        await engine.pause_generation(mode=mode, clear_cache=clear_cache)
        return JSON({"status": "paused"})

    @Endpoint.RESUME.route(app, responses=responses(Status, *_ERRORS))
    async def resume() -> Response:
        """End a pause."""
        await engine.resume_generation()
        return JSON({"status": "resumed"})

    @Endpoint.IS_PAUSED.route(app, responses=responses(Paused, *_ERRORS))
    async def is_paused() -> Response:
        """Whether the engine is paused or asleep."""
        return JSON({"is_paused": await engine.is_paused()})

    @Endpoint.SLEEP.route(app, responses=responses(SleepStatus, *_ERRORS))
    async def sleep(level: Annotated[int, Query(ge=0, le=2)] = 1, mode: PauseMode = "abort") -> Response:
        """Pause the engine, and give up the memory of the KV cache, and of weights with level 2 or on GPUs."""
        await engine.sleep(level, mode)
        return JSON({"status": "sleeping", "level": level})

    @Endpoint.WAKE_UP.route(app, responses=responses(WakeStatus, *_ERRORS))
    async def wake_up(tags: Annotated[list[str] | None, Query()] = None) -> Response:
        """End a sleep. With `tags`, wake only a part: weights or kv_cache."""
        is_awake = await engine.wake_up(tags)
        return JSON({"status": "awake" if is_awake else "sleeping", "tags": tags})

    @Endpoint.IS_SLEEPING.route(app, responses=responses(Sleeping, *_ERRORS))
    async def is_sleeping() -> Response:
        """Whether the engine sleeps at any level. A pause is a sleep of level 0."""
        return JSON({"is_sleeping": await engine.is_sleeping()})

    @Endpoint.RESET_PREFIX_CACHE.route(app, responses=responses(Success, *_ERRORS))
    async def reset_prefix_cache(reset_running_requests: bool = False, reset_external: bool = False) -> Response:
        """Clear the prefix cache. It isn't cleared on ranks with running requests, unless these are reset, too."""
        return JSON({"success": await engine.reset_prefix_cache(reset_running_requests, reset_external)})

    @Endpoint.START_PROFILE.route(app, responses=responses(None, *_ERRORS))
    async def start_profile(body: StartProfileRequest | None = None) -> Response:
        """Start a profile of all ranks' steps. The engine needs the option `profiler_config`."""
        asked = body or StartProfileRequest()
        await engine.start_profile(asked.profile_prefix, asked.delay_iterations, asked.max_iterations)
        return Response()

    @Endpoint.STOP_PROFILE.route(app, responses=responses(None, *_ERRORS))
    async def stop_profile() -> Response:
        """End the profile, and respond when its files are written."""
        await engine.stop_profile()
        return Response()


def add_adapter_endpoints(app: FastAPI, adapters: AdapterCalls) -> None:
    """Add the paths that load and unload LoRA adapters."""

    @Endpoint.LOAD_LORA_ADAPTER.route(app, responses=responses(Status, 403, *_BODY_ERRORS))
    async def load_lora_adapter(body: LoadLoraAdapterRequest) -> Response:
        """Load a LoRA adapter from the server's disk. Requests may then give its name as `model`."""
        await adapters.load_lora_adapter(body.lora_name, body.lora_path, body.load_inplace)
        return JSON({"status": "loaded"})

    @Endpoint.UNLOAD_LORA_ADAPTER.route(app, responses=responses(Status, 404, *_BODY_ERRORS))
    async def unload_lora_adapter(body: UnloadLoraAdapterRequest) -> Response:
        """Refuse new requests for a LoRA adapter. Requests in progress finish."""
        await adapters.unload_lora_adapter(body.lora_name, body.lora_int_id)
        return JSON({"status": "unloaded"})
