"""The endpoints that take and give tokens."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response

from raycore.parts.images.server import has_images
from raycore.server.endpoints import Endpoint
from raycore.server.generation import ServingEngine
from raycore.server.headers import DataParallelRank
from raycore.server.models import Models
from raycore.server.openapi.document import responses
from raycore.server.options import ServerOptions
from raycore.server.preparation import handle_body, prepare_chat, prepare_completion
from raycore.server.protocol import ChatCompletionRequest, CompletionRequest
from raycore.server.request_ids import request_id_of
from raycore.server.streaming import JSON, EventStream, unless_client_leaves
from raycore.server.token_api.derendering import derender_chat, derender_completion
from raycore.server.token_api.generation import Generation
from raycore.server.token_api.protocol import (
    AbortGenerationsRequest,
    DerenderChatRequest,
    DerenderCompletionRequest,
    GenerateRequest,
)
from raycore.server.token_api.rendering import rendered
from raycore.server.token_api.response_models import Derendered, GeneratedTokens, RenderedCompletion, RenderedRequest

_ERRORS = (400, 401, 404, 408, 413, 429, 500, 503)


def add_token_endpoints(app: FastAPI, engine: ServingEngine, options: ServerOptions, models: Models) -> None:
    """Add the endpoints to an application."""

    @Endpoint.GENERATE.route(app, responses=responses(GeneratedTokens, *_ERRORS, streams=True))
    async def generate(
        body: GenerateRequest, request: Request, data_parallel_rank: DataParallelRank = None
    ) -> Response:
        """Continue a prompt of tokens, with tokens."""
        body.send_to(data_parallel_rank)
        given = engine, body, options, models, request_id_of(request.scope)
        executor = engine.images.executor if body.content_parts else None
        prepared = await handle_body(request, Generation.prepare, *given, executor=executor)
        if body.stream:
            return EventStream(prepared.events())
        return JSON(await unless_client_leaves(request, prepared.answer()))

    described = responses(None, 400, 401, 408, 413, 500, 503)

    @Endpoint.ABORT_GENERATIONS.route(app, responses=described, response_class=Response)
    async def abort_generations(body: AbortGenerationsRequest) -> Response:
        """End requests with their output so far."""
        await engine.abort_requests(body.request_ids)
        return Response()

    @Endpoint.RENDER_CHAT.route(app, responses=responses(RenderedRequest, *_ERRORS))
    async def render_chat(body: ChatCompletionRequest, request: Request) -> Response:
        """What a chat request becomes: the body for /inference/v1/generate."""
        body.request_id = body.request_id or request_id_of(request.scope)
        executor = engine.images.executor if has_images(body.messages) else None
        chat = await handle_body(request, prepare_chat, engine, body, options, models, executor=executor)
        return JSON(rendered(chat.message.job, body))

    @Endpoint.RENDER_COMPLETIONS.route(app, responses=responses(RenderedCompletion, *_ERRORS))
    async def render_completion(body: CompletionRequest, request: Request) -> Response:
        """What the prompts of a completion request become: bodies for /inference/v1/generate."""
        body.request_id = body.request_id or request_id_of(request.scope)
        completion = await handle_body(request, prepare_completion, engine, body, options, models)
        return JSON([rendered(job, body) for job in completion.jobs])

    @Endpoint.DERENDER_CHAT.route(app, responses=responses(Derendered, *_ERRORS))
    async def derender_chat_tokens(body: DerenderChatRequest, request: Request) -> Response:
        """The chat response for tokens, or the event of a stream for the next tokens."""
        executor = engine.images.executor if body.chat_request and has_images(body.chat_request.messages) else None
        return JSON(await handle_body(request, derender_chat, engine, body, options, models, executor=executor))

    @Endpoint.DERENDER_COMPLETIONS.route(app, responses=responses(Derendered, *_ERRORS))
    async def derender_completion_tokens(body: DerenderCompletionRequest, request: Request) -> Response:
        """The response of completions for tokens, or the event of a stream for the next tokens."""
        return JSON(await handle_body(request, derender_completion, engine, body, options, models))
