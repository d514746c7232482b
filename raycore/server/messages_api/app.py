"""The endpoints of Anthropic's Messages API."""

from __future__ import annotations

from concurrent.futures import Executor

from fastapi import FastAPI, Request
from starlette.responses import Response

from raycore.server.endpoints import Endpoint
from raycore.server.generation import ServingEngine
from raycore.server.headers import DataParallelRank
from raycore.server.messages_api.answer import MessageAnswer, count_tokens
from raycore.server.messages_api.protocol import CountTokensRequest, MessagesRequest
from raycore.server.messages_api.response_models import AnthropicError, MessageBody, TokenCount
from raycore.server.messages_api.translation import has_images
from raycore.server.models import Models
from raycore.server.openapi.document import responses
from raycore.server.options import ServerOptions
from raycore.server.preparation import handle_body
from raycore.server.request_ids import request_id_of
from raycore.server.streaming import JSON, EventStream, unless_client_leaves
from raycore.server.token_api.rendering import rendered
from raycore.server.token_api.response_models import RenderedRequest

_ERRORS = (400, 401, 404, 408, 413, 429, 500, 503)


def add_messages(app: FastAPI, engine: ServingEngine, options: ServerOptions, models: Models) -> None:
    """Add the endpoints to an application."""

    @Endpoint.MESSAGES.route(app, responses=responses(MessageBody, *_ERRORS, streams=True, error=AnthropicError))
    async def messages(
        body: MessagesRequest, request: Request, data_parallel_rank: DataParallelRank = None
    ) -> Response:
        """Generate the next message of a conversation, as Anthropic's Messages API does."""
        given = engine, body, options, models, request_id_of(request.scope), data_parallel_rank
        prepared = await handle_body(request, MessageAnswer.prepare, *given, executor=executor(body))
        if body.stream:
            return EventStream(prepared.events(), has_names=True)
        return JSON(await unless_client_leaves(request, prepared.answer()))

    @Endpoint.RENDER_MESSAGES.route(app, responses=responses(RenderedRequest, *_ERRORS, error=AnthropicError))
    async def render_messages(body: MessagesRequest, request: Request) -> Response:
        """What a request for a message becomes: the body for /inference/v1/generate."""
        given = engine, body, options, models, request_id_of(request.scope)
        prepared = await handle_body(request, MessageAnswer.prepare, *given, executor=executor(body))
        return JSON(rendered(prepared.run.job, body))

    @Endpoint.COUNT_TOKENS.route(app, responses=responses(TokenCount, *_ERRORS, error=AnthropicError))
    async def tokens_of_messages(body: CountTokensRequest, request: Request) -> Response:
        """Count the tokens of a conversation, as Anthropic's Messages API does."""
        given = engine, body, options, models
        return JSON(await handle_body(request, count_tokens, *given, executor=executor(body)))

    def executor(body: CountTokensRequest) -> Executor | None:
        return engine.images.executor if has_images(body) else None
