"""The ingress of several models, and of models with adapters: sends each request to the model that it names."""

# ray's own types are partial:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUntypedClassDecorator=false

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qs

import msgspec
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from raycore.parts.adapters.serve import adapter_names
from raycore.ray_api import FromDriversCopy
from raycore.serve.http_calls import HttpCall, ResponseStart
from raycore.server.endpoints import Endpoint, Rule, path_of, paths_with
from raycore.server.http.error_bodies import error_body
from raycore.server.http.errors import APIError
from raycore.server.http.request_ids import RequestIds
from raycore.server.http.streaming import JSON
from raycore.server.middleware.checks import KeyCheck, WholeBody
from raycore.server.options import ServerOptions, api_keys_of_environment
from raycore.server.serve_app import DRAIN_TIMEOUT_S, late_ingress

logger = logging.getLogger(__name__)

_MAX_HANDLES = 1024
_LISTING = Endpoint.LIST_MODELS.path
_NEED_MODEL = frozenset(paths_with(Rule.ADMISSION))
"""Requests to other paths go to the first model if they name none."""
_READING = ("GET", "HEAD")
_OWN_HEALTH = frozenset((Endpoint.HEALTH.path, Endpoint.PING.path))


class _Body(msgspec.Struct):
    """The part of a request's body that says where it goes."""

    model: str | None = None


@serve.deployment(
    name="raycore-ingress",
    ray_actor_options={"num_cpus": 0},
    # the models' deployments have limits of their own
    max_ongoing_requests=1_000_000,
    graceful_shutdown_timeout_s=DRAIN_TIMEOUT_S,
)
@late_ingress
class Ingress(FromDriversCopy):
    """Divides requests among models."""

    async def __init__(self, models: dict[str, Any], adapters: dict[str, str], max_body_bytes: int) -> None:
        """
        Args:
            models: the handle of each model's deployment, by the model's id.
            adapters: the folder of a model's adapters, by the model's id. The others have none.
            max_body_bytes: maximum size of a request's body.
        """
        options = ServerOptions(tuple(models), api_keys=api_keys_of_environment(), max_body_bytes=max_body_bytes)
        self._app: ASGIApp = Routing(models, adapters)
        for middleware in (WholeBody, KeyCheck):
            self._app = middleware(self._app, options)
        self._app = RequestIds(self._app, returns=False)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._app


class Routing:
    """The ASGI application that sends requests on."""

    def __init__(self, models: Mapping[str, Any], adapters: Mapping[str, str]) -> None:
        self._models = {model_id: handle.options(stream=True) for model_id, handle in models.items()}
        self._adapters = adapters
        self._cards: dict[str, list[dict[str, Any]]] = {}
        """What each model has said of itself, by its id."""
        # a handle has connections of its own
        self._handle_of_adapter = lru_cache(_MAX_HANDLES)(self._new_handle)
        self._lifespan = Starlette()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._lifespan(scope, receive, send)
            return
        try:
            await self._respond(scope, receive, send)
        except APIError as error:
            headers = {"retry-after": "1"} if error.status in (429, 503) else None
            await JSON(error_body(error, scope), error.status, headers)(scope, receive, send)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = path_of(scope)
        if path in _OWN_HEALTH:
            await Response()(scope, receive, send)
        elif path == _LISTING and scope["method"] in _READING:
            await JSON({"object": "list", "data": await self._listed()})(scope, receive, send)
        elif path.startswith(f"{_LISTING}/") and scope["method"] in _READING:
            await JSON(await self._card(path.removeprefix(f"{_LISTING}/")))(scope, receive, send)
        else:
            await self._forward(scope, receive, send)

    # ---- requests

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        if scope["method"] not in _READING:
            body = (await receive()).get("body", b"")  # whole: see WholeBody
        handle = self._handle_of(self._named(scope, body), path_of(scope))
        query: bytes = scope.get("query_string", b"")
        call = HttpCall(scope["method"], path_of(scope), [tuple(each) for each in scope["headers"]], body, query)
        parts = handle.respond.remote(call)
        left = asyncio.ensure_future(_disconnect(receive))
        sending = asyncio.ensure_future(_send_all(parts, send))
        try:
            await asyncio.wait((sending, left), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            left.cancel()
            if not sending.done():
                parts.cancel()
                sending.cancel()
                with suppress(asyncio.CancelledError, RayError, APIError):
                    await sending

    def _named(self, scope: Scope, body: bytes) -> str | None:
        """The model that a request names: in its body, or in its query."""
        named: str | None = None
        if body:
            # the model's own server explains what is wrong with a body
            with suppress(msgspec.DecodeError):
                named = msgspec.json.decode(body, type=_Body).model
        if named:
            return named
        given = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("model")
        return given[0] if given else None

    def _handle_of(self, name: str | None, path: str) -> Any:
        """Where a request for a model goes. Raises APIError if there is no such model."""
        if name is None:
            if len(self._models) > 1 and path in _NEED_MODEL:
                served = ", ".join(self._models)
                raise APIError(400, f"model is missing: give one of the models served here: {served}", param="model")
            return next(iter(self._models.values()))
        if name in self._models:
            return self._models[name]
        self._base_of(name)
        return self._handle_of_adapter(name)

    def _base_of(self, name: str) -> str:
        """The id of an adapter's model. Raises APIError if there is none."""
        for model_id in self._adapters:
            if name.startswith(f"{model_id}:"):
                return model_id
        served = ", ".join(self._models)
        message = f"the model {name!r} doesn't exist; served here: {served}"
        raise APIError(404, message, param="model", code="model_not_found")

    def _new_handle(self, name: str) -> Any:
        return self._models[self._base_of(name)].options(multiplexed_model_id=name)

    # ---- lists of models

    async def _listed(self) -> list[dict[str, Any]]:
        cards = await asyncio.gather(*map(self._cards_of, self._models))
        return [card for each in cards for card in each]

    async def _card(self, name: str) -> dict[str, Any]:
        card = next((card for card in await self._listed() if card["id"] == name), None)
        if card is None:
            raise APIError(404, f"the model {name!r} doesn't exist", param="model", code="model_not_found")
        return card

    async def _cards_of(self, model_id: str) -> list[dict[str, Any]]:
        """What a model's server lists, and the adapters in its folder."""
        if model_id not in self._cards:
            keys = [(b"authorization", f"Bearer {key}".encode("latin-1")) for key in api_keys_of_environment()]
            parts = [
                part async for part in _parts(self._models[model_id].respond.remote(HttpCall("GET", _LISTING, keys)))
            ]
            said = msgspec.json.decode(b"".join(part for part in parts if isinstance(part, bytes)))
            # the adapters that this replica happens to hold are in the folder
            self._cards[model_id] = [card for card in said["data"] if not card["id"].startswith(f"{model_id}:")]
        own, folder = self._cards[model_id], self._adapters.get(model_id)
        names = await asyncio.to_thread(adapter_names, folder)
        return own + [{**own[0], "id": f"{model_id}:{name}", "parent": model_id} for name in names]


async def _send_all(parts: Any, send: Send) -> None:
    async for part in _parts(parts):
        if isinstance(part, ResponseStart):
            await send({"type": "http.response.start", "status": part.status, "headers": part.headers})
        else:
            await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _parts(parts: Any) -> AsyncIterator[ResponseStart | bytes]:
    """The parts of a response. Raises APIError if a replica fails before the first one."""
    has_begun = False
    try:
        async for part in parts:
            has_begun = True
            yield part
    except (RayError, BackPressureError, DeploymentUnavailableError) as error:
        if has_begun:
            raise
        logger.warning("a request failed before its response began: %s", error)
        why = str(error).partition("\n")[0]
        raise APIError(503, why, code="engine_unavailable", kind="service_unavailable_error") from error


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
