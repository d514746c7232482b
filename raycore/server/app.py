"""The ASGI application that serves the OpenAI API for an engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from raycore.client.request_log import RequestLog
from raycore.errors import InvalidConfig, RaycoreError
from raycore.parts.adapters.server.adapters import AdapterSource
from raycore.parts.images.server import has_images
from raycore.parts.weights.server import add_weight_endpoints
from raycore.server.added_middleware import add_middleware
from raycore.server.admin import add_adapter_endpoints, add_admin_endpoints, add_fleet_endpoints
from raycore.server.chat.chat import Chat
from raycore.server.chat.prompt import prompt_ids
from raycore.server.completions import Completion
from raycore.server.endpoints import Endpoint
from raycore.server.error_bodies import error_body
from raycore.server.errors import APIError, invalid_body, unreadable_body
from raycore.server.generation import ServingEngine
from raycore.server.headers import DataParallelRank
from raycore.server.invocations import Invocations, add_invocations
from raycore.server.json_text import to_json
from raycore.server.messages_api.app import add_messages
from raycore.server.metrics import add_metrics
from raycore.server.middleware import Admission, KeyCheck, NoteIgnoredFields, RequestsInProgress, WholeBody
from raycore.server.models import ListedModel, Models
from raycore.server.openapi.document import describe, responses
from raycore.server.openapi.response_models import (
    ChatAnswer,
    CompletionAnswer,
    DetokenizedText,
    Load,
    Model,
    ModelList,
    TokenizerInfo,
    Tokens,
    Version,
)
from raycore.server.options import ServerOptions, limited_by
from raycore.server.preparation import (
    add_long_bodies,
    handle_body,
    prepare_batched_chats,
    prepare_chat,
    prepare_completion,
)
from raycore.server.protocol import (
    BatchChatCompletionRequest,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    Message,
    SamplingRequest,
    TokenizeRequest,
)
from raycore.server.refusals import refuse_others
from raycore.server.request_ids import RequestIds, headers_of, request_id_of, told_error
from raycore.server.responses.store import MemoryStore, ResponseStore
from raycore.server.route_index import RouteIndex
from raycore.server.streaming import CLIENT_CLOSED_REQUEST, JSON, ClientLeft, EventStream, unless_client_leaves
from raycore.server.token_api.app import add_token_endpoints
from raycore.server.unknown_paths import unknown_path, wrong_method
from raycore.text.tokenizer_files import read_tokenizer_files

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ERRORS = (400, 401, 404, 408, 413, 429, 500, 503)


def build_app(
    engine: ServingEngine,
    options: ServerOptions,
    adapters: AdapterSource | None = None,
    response_store: ResponseStore | None = None,
    *,
    returns_request_ids: bool = True,
) -> FastAPI:
    """Build the application. The application doesn't own `engine`: the caller has to shut the engine down.

    Args:
        adapters: the LoRA adapters that it offers, from `load_adapters(engine, options)`. None: none, and none can be
            loaded.
        response_store: where responses are stored. None: in this process.
        returns_request_ids: whether responses have a header X-Request-Id. False: whoever serves the application adds
            it, as Ray Serve does.

    Raises:
        InvalidConfig: `options` has adapters, and `adapters` is None.
    """
    if adapters is None and (options.lora_modules or options.allowed_lora_directories):
        raise InvalidConfig("lora_modules and allowed_lora_directories: build_app() needs `await load_adapters(...)`")
    if options.log.enable_log_requests:
        log = options.log
        engine.watch(
            RequestLog(
                engine.get_tokenizer(),
                outputs=log.enable_log_outputs,
                deltas=log.enable_log_deltas,
                max_len=log.max_log_len,
            )
        )
    app = FastAPI(
        title="raycore",
        version=version("raycore"),
        docs_url=None if options.http.disable_fastapi_docs else "/docs",
        openapi_url=None if options.http.disable_fastapi_docs else "/openapi.json",
        redoc_url=None,
        strict_content_type=False,  # parse a body as JSON even without a Content-Type header
    )
    options = limited_by(options, engine)
    app.root_path = options.http.root_path
    app.state.engine, app.state.options = engine, options
    add_long_bodies(app)
    models = app.state.models = Models(options.served_model_names)
    if adapters is not None:
        adapters.subscribe(models.set_adapters)
    in_progress = RequestsInProgress()
    app.add_middleware(Admission, engine=engine, options=options, in_progress=in_progress)
    app.add_middleware(Invocations, spec=engine.pooling_spec)
    app.add_middleware(WholeBody, options=options)
    app.add_middleware(NoteIgnoredFields, options=options)
    app.add_middleware(KeyCheck, options=options)
    add_metrics(app, engine, options.served_model_names[0])
    add_middleware(app, options.http)
    app.add_middleware(RequestIds, returns=returns_request_ids)  # the outermost, because errors name the id
    _handle_errors(app)
    if engine.pooling_spec is None:
        from raycore.server.responses.routes import add_responses  # only for models that generate

        _add_completions(app, engine, options, models)
        add_messages(app, engine, options, models)
        add_token_endpoints(app, engine, options, models)
        if response_store is None:
            response_store = MemoryStore(options.max_stored_responses, options.max_stored_response_bytes)
        add_responses(app, engine, options, models, response_store, in_progress)
    else:
        from raycore.parts.pooling.server.app import add_pooling  # only for models that pool

        add_pooling(app, engine, options, models)
    refuse_others(app, engine.pooling_spec, options)
    add_invocations(app, engine.pooling_spec)
    _add_tokens(app, engine, options, models)
    _add_information(app, engine, models, in_progress)
    if options.enable_admin_endpoints:
        add_admin_endpoints(app, engine)
        add_fleet_endpoints(app, engine)
        add_weight_endpoints(app, engine)
        if adapters is not None:
            add_adapter_endpoints(app, adapters)
    app.router.middleware_stack = RouteIndex(app.router)
    # FastAPI encodes the description itself
    app.openapi = cache(lambda: msgspec.json.decode(to_json(describe(app, options, engine))))
    return app


def _handle_errors(app: FastAPI) -> None:
    """Answer every error with an error object."""

    async def told(request: Request, error: Exception) -> Response:
        api_error = told_error(error, request.scope)
        if api_error.status == 500 and api_error is not error:
            what = request.method, request.url.path, request_id_of(request.scope)
            logger.error("%s %s failed, request %s", *what, exc_info=error)
        return JSON(error_body(api_error, request.scope), api_error.status, headers_of(request.scope))

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return JSON(error_body(invalid_body(error.errors()), request.scope), 400)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        headers = {name.lower(): value for name, value in (error.headers or {}).items()}
        if error.status_code == 404:
            told = unknown_path(request)
        elif error.status_code == 405:
            told, headers["allow"] = wrong_method(request)
        else:
            told = unreadable_body(error)
        return JSON(error_body(told, request.scope), told.status, headers)

    async def left(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ClientLeft, left)
    for kind in (APIError, RaycoreError, Exception):
        app.add_exception_handler(kind, told)


def _add_completions(app: FastAPI, engine: ServingEngine, options: ServerOptions, models: Models) -> None:
    async def prepared(
        request: Request, prepare: Callable[..., T], body: SamplingRequest, messages: Iterable[Message] = ()
    ) -> T:
        body.request_id = body.request_id or request_id_of(request.scope)
        executor = engine.images.executor if has_images(messages) else None
        return await handle_body(request, prepare, engine, body, options, models, executor=executor)

    async def respond(request: Request, made: Completion | Chat) -> Response:
        if made.request.stream:
            return EventStream(made.events(), keep_alive_s=options.sse_keep_alive_interval)
        return JSON(await unless_client_leaves(request, made.answer()))

    @Endpoint.COMPLETIONS.route(app, responses=responses(CompletionAnswer, *_ERRORS, streams=True))
    async def completions(
        body: CompletionRequest, request: Request, data_parallel_rank: DataParallelRank = None
    ) -> Response:
        """Complete one or more prompts."""
        body.send_to(data_parallel_rank)
        return await respond(request, await prepared(request, prepare_completion, body))

    @Endpoint.CHAT.route(app, responses=responses(ChatAnswer, *_ERRORS, streams=True))
    async def chat_completions(
        body: ChatCompletionRequest, request: Request, data_parallel_rank: DataParallelRank = None
    ) -> Response:
        """Generate the next message of a conversation."""
        body.send_to(data_parallel_rank)
        return await respond(request, await prepared(request, prepare_chat, body, body.messages))

    @Endpoint.BATCHED_CHATS.route(app, responses=responses(ChatAnswer, *_ERRORS))
    async def batched_chat_completions(
        body: BatchChatCompletionRequest, request: Request, data_parallel_rank: DataParallelRank = None
    ) -> Response:
        """Generate the next message of each of several conversations: a choice for each, in their order."""
        body.send_to(data_parallel_rank)
        made = await prepared(request, prepare_batched_chats, body, chain.from_iterable(body.messages))
        return JSON(await unless_client_leaves(request, made.answer()))


def _add_tokens(app: FastAPI, engine: ServingEngine, options: ServerOptions, models: Models) -> None:
    @Endpoint.TOKENIZE.route(app, responses=responses(Tokens, *_ERRORS))
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """Tokenize a text or a conversation."""
        executor = engine.images.executor if has_images(body.messages) else None
        return await handle_body(request, _tokenize, engine, body, options, models, executor=executor)

    if options.enable_tokenizer_info_endpoint:

        @Endpoint.TOKENIZER_INFO.route(app, responses=responses(TokenizerInfo, 401))
        async def tokenizer_info() -> Response:
            """The tokenizer's configuration, with the chat template."""
            return JSON(await asyncio.to_thread(_tokenizer_info, engine, options))

    @Endpoint.DETOKENIZE.route(app, responses=responses(DetokenizedText, *_ERRORS))
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        """Convert token ids to text."""
        return await handle_body(request, _detokenize, engine, body, models)


def _tokenize(engine: ServingEngine, body: TokenizeRequest, options: ServerOptions, models: Models) -> Response:
    models.find(body.model)
    tokenizer = engine.get_tokenizer()
    if (body.prompt is None) == (body.messages is None):
        raise APIError(400, "give exactly one of prompt and messages", param="prompt")
    if body.messages is not None:
        ids = prompt_ids(engine, options, body.messages, body.tools, body, body.chat_template_kwargs or {})
    else:
        assert body.prompt is not None
        ids = tokenizer.encode(body.prompt, body.add_special_tokens is not False)
    strings = [tokenizer.vocabulary_entry(token_id) for token_id in ids] if body.return_token_strs else None
    return JSON({"count": len(ids), "max_model_len": engine.max_model_len, "tokens": ids, "token_strs": strings})


def _tokenizer_info(engine: ServingEngine, options: ServerOptions) -> dict[str, Any]:
    config = read_tokenizer_files(Path(engine.config.model.tokenizer)).config
    info = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    return info if options.chat_template is None else {**info, "chat_template": options.chat_template}


def _detokenize(engine: ServingEngine, body: DetokenizeRequest, models: Models) -> Response:
    models.find(body.model)
    tokenizer = engine.get_tokenizer()
    unknown = next((token_id for token_id in body.tokens if not 0 <= token_id < tokenizer.vocab_size), None)
    if unknown is not None:
        raise APIError(400, f"tokens contains {unknown}, which isn't in the tokenizer's vocabulary", param="tokens")
    return JSON({"prompt": tokenizer.decode_batch([body.tokens], skip_special_tokens=False)[0]})


def _add_information(app: FastAPI, engine: ServingEngine, models: Models, in_progress: RequestsInProgress) -> None:
    @Endpoint.MODELS.route(app, responses=responses(ModelList, 401))
    async def list_models() -> Response:
        """List the names under which the model is served, and the adapters."""
        return JSON({"object": "list", "data": [_model(each, engine) for each in models.listed()]})

    @Endpoint.MODEL.route(app, responses=responses(Model, 401, 404))
    async def model(model: str) -> Response:
        """Look up one of the names under which the model is served, or an adapter."""
        if not model:  # the path ends with a slash
            raise HTTPException(404)
        return JSON(_model(models.look_up(model), engine))

    async def health() -> Response:
        """200 while the engine accepts requests; 503 when it has failed or is draining."""
        unavailable_reason = engine.unavailable_reason
        if unavailable_reason is not None:
            raise APIError(503, unavailable_reason, code="engine_unavailable", kind="service_unavailable_error")
        return Response()

    for endpoint in (Endpoint.HEALTH, Endpoint.PING, Endpoint.POSTED_PING):
        endpoint.route(app, responses=responses(None, 503), response_class=Response)(health)

    @Endpoint.VERSION.route(app, responses=responses(Version))
    async def show_version() -> Response:
        """The version of raycore."""
        return JSON({"version": version("raycore")})

    @Endpoint.LOAD.route(app, responses=responses(Load))
    async def load() -> Response:
        """The number of requests to the model or its tokenizer in progress in the process that answers."""
        return JSON({"server_load": in_progress.count})


def _model(model: ListedModel, engine: ServingEngine) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "raycore",
        "root": model.root or engine.config.model.model,
        "parent": model.parent,
        "max_model_len": engine.max_model_len,
    }
