"""`POST /invocations`, the one path of SageMaker: a request goes to the endpoint that its fields belong to."""

from __future__ import annotations

from typing import Any, cast

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raycore.parts.pooling.models.pooling import PoolingSpec
from raycore.server.batch.files import NOT_JSON
from raycore.server.contract.handlers import answers
from raycore.server.contract.refusals import is_served
from raycore.server.contract.service import Context
from raycore.server.endpoints import Endpoint, path_of
from raycore.server.http.errors import APIError

_OBJECT = {"schema": {"type": "object"}}

_FIELDS: tuple[tuple[Endpoint, frozenset[str]], ...] = (
    (Endpoint.CHAT_COMPLETIONS, frozenset({"messages"})),
    (Endpoint.COMPLETIONS, frozenset({"prompt"})),
    (Endpoint.RERANK, frozenset({"query", "documents"})),
    (Endpoint.SCORE, frozenset({"text_1", "text_2"})),
    (Endpoint.SCORE, frozenset({"data_1", "data_2"})),
    (Endpoint.SCORE, frozenset({"queries", "documents"})),
    (Endpoint.SCORE, frozenset({"queries", "items"})),
    (Endpoint.COHERE_EMBED, frozenset({"texts"})),
    (Endpoint.POOLING, frozenset({"task"})),
    *((each, frozenset({name})) for each in (Endpoint.EMBEDDINGS, Endpoint.CLASSIFY) for name in ("input", "messages")),
    *((Endpoint.POOLING, frozenset({name})) for name in ("input", "messages")),
)
"""Endpoints, each with fields that only its requests have. The first one that the model has is taken."""


class Invocations:
    """Middleware that gives requests to /invocations the path of the endpoint that they belong to.

    It is inside the one that reads the whole body, and outside those whose rules depend on the path.
    """

    def __init__(self, app: ASGIApp, spec: PoolingSpec | None) -> None:
        """`spec`: what the model pools. None: it generates."""
        self._app = app
        self._spec = spec

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or path_of(scope) != Endpoint.INVOCATIONS.path:
            await self._app(scope, receive, send)
            return
        messages: list[Message] = [await receive()]
        endpoint = self._endpoint(messages[0].get("body", b""))
        if endpoint is not None:
            scope["path"] = scope.get("root_path", "") + endpoint.path
            scope["raw_path"] = scope["path"].encode()

        async def receive_again() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, receive_again, send)

    def _endpoint(self, body: bytes) -> Endpoint | None:
        try:
            fields: Any = msgspec.json.decode(body)
        except NOT_JSON:
            return None
        if not isinstance(fields, dict):
            return None
        given = {name for name, value in cast("dict[str, Any]", fields).items() if value is not None}
        return next((each for each, names in _FIELDS if names <= given and is_served(each, self._spec)), None)


@answers(None, errors=(400, 404, 409, 429, 500, 503), streams=True, content={"application/json": _OBJECT})
async def invocations(context: Context, body: dict[str, Any]) -> None:
    """Run a request to any of the model's endpoints, which its fields choose. For SageMaker."""
    served = [(each, names) for each, names in _FIELDS if is_served(each, context.engine.pooling_spec)]
    expected = "; ".join(f"{' and '.join(sorted(names))} for {each.path}" for each, names in served)
    raise APIError(400, f"the fields don't say which endpoint is meant: {expected}")
