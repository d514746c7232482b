"""What an endpoint does: a function that answers its requests, with what FastAPI has to know of it.

A module has its handlers as functions with one of the two decorators, `answers` and `runs`. A handler's first parameter
is the request's `Context`. The others are FastAPI's: `body`, and those of the path and the query.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import Annotated, Any, Protocol

from fastapi import Header, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel
from starlette.responses import Response

from raycore.class_paths import import_path
from raycore.server.contract.service import Context, Service
from raycore.server.endpoints import Endpoint, Rule, is_anthropic
from raycore.server.http.bodies import handle_body
from raycore.server.http.request_ids import request_id_of
from raycore.server.http.streaming import JSON, unless_client_leaves
from raycore.server.openapi.response_models import AnthropicError, ErrorAnswer
from raycore.server.openapi.responses import responses

DataParallelRank = Annotated[int | None, Header(alias="X-data-parallel-rank", ge=0)]
"""The data-parallel rank that runs the request. Without this header, the server chooses a rank."""

_REQUEST = Parameter("request", Parameter.POSITIONAL_OR_KEYWORD, annotation=Request)
_RANK = Parameter("data_parallel_rank", Parameter.KEYWORD_ONLY, default=None, annotation=DataParallelRank)

_ERRORS = {
    Rule.ADMISSION: (400, 404, 429, 500, 503),
    Rule.CONTROLS: (400, 500, 503),
}
"""The errors that follow from rules. A path of POST has `_POST_ERRORS`, too, and one without `NO_KEY` has 401."""
_POST_ERRORS = (408, 413, 415)
"""The middleware reads whatever body comes, before anything else does."""


class Run(Protocol):
    """A checked request to the model."""

    async def answer(self) -> Any:
        """Run the request, and return its response: a plain value, or a response that isn't JSON."""
        ...


@dataclass(frozen=True)
class Handler:
    """What an endpoint does."""

    work: Callable[..., Any]
    """Returns a response, or a plain value for JSON, or None for an empty body. A coroutine function runs on the event
    loop. Another function runs on a thread, unless it has only a short body to read."""
    signature: inspect.Signature
    """What FastAPI reads of a request: the HTTP request itself, the body, and parameters."""
    description: str
    answer: type[BaseModel] | type[Response] | None
    """The model of the response, or the class of a response that isn't JSON. None: the body is empty."""
    name: str | None = None
    """FastAPI's name of the operation. None: that of the endpoint."""
    body: type[Any] | None = None
    """The body's model."""
    errors: tuple[int, ...] = ()
    """Statuses of errors that don't follow from the endpoint's rules."""
    content: Mapping[str, Any] | None = None
    """Other types of the response's body, by media type, each with its description."""
    is_run: bool = False
    """Whether `work` returns a `Run`."""
    streams: bool = False
    """Whether the response is a stream of events if the body's `stream` says so."""
    names_events: bool = False
    """Whether the events of a run's stream have the names that their fields `type` have."""
    has_images: Callable[[Any], bool] | None = None
    """Whether a body has images, so that its work belongs on the threads for images. None: it never has."""
    in_batches: Callable[..., Run] | None = None
    """What makes a `Run` for `raycore run-batch`. None: `work`."""

    def bound(self, service: Service) -> Callable[..., Any]:
        """The function that FastAPI calls."""
        answered = self._way()

        async def handle(request: Request, data_parallel_rank: int | None = None, **given: Any) -> Response:
            context = Context(service, request_id_of(request.scope), data_parallel_rank, request)
            return await answered(context, request, given)

        vars(handle)["__signature__"] = self.signature
        return handle

    def _way(self) -> Callable[[Context, Request, dict[str, Any]], Coroutine[Any, Any, Response]]:
        if self.is_run:
            return self._run
        if inspect.iscoroutinefunction(self.work):
            return self._on_loop
        return self._on_any_thread if self.body is not None else self._on_other_thread

    async def _on_loop(self, context: Context, request: Request, given: dict[str, Any]) -> Response:
        return _response(await self.work(context, **given))

    async def _on_other_thread(self, context: Context, request: Request, given: dict[str, Any]) -> Response:
        return _response(await run_in_threadpool(self.work, context, **given))

    async def _on_any_thread(self, context: Context, request: Request, given: dict[str, Any]) -> Response:
        return _response(await self._worked(context, request, given["body"]))

    async def _run(self, context: Context, request: Request, given: dict[str, Any]) -> Response:
        body = given["body"]
        made = await self._worked(context, request, body)
        if self.streams and body.stream:
            return context.stream(made.events(), has_names=self.names_events)
        return _response(await unless_client_leaves(request, made.answer()))

    async def _worked(self, context: Context, request: Request, body: Any) -> Any:
        has_images = self.has_images is not None and self.has_images(body)
        executor = context.engine.images.executor if has_images else None
        return await handle_body(request, self.work, context, body, executor=executor)

    def described(self, endpoint: Endpoint) -> dict[str, Any]:
        """What FastAPI has to know of an endpoint that this handler has: arguments of `FastAPI.api_route`."""
        told: dict[str, Any] = {"name": self.name or endpoint.name.lower(), "description": self.description}
        if self.answer is not None and issubclass(self.answer, Response):
            return told | {"response_class": self.answer}
        errors = {
            *self.errors,
            *(status for rule, those in _ERRORS.items() if rule in endpoint.rules for status in those),
        }
        errors |= set() if Rule.NO_KEY in endpoint.rules else {401}
        errors |= set(_POST_ERRORS) if endpoint.method == "POST" else set()
        error = AnthropicError if is_anthropic(endpoint.path) else ErrorAnswer
        told["responses"] = responses(self.answer, *sorted(errors), streams=self.streams, error=error)
        if self.content is not None:
            told["responses"][200].setdefault("content", {}).update(self.content)
        elif self.answer is None:
            told["response_class"] = Response  # not JSON: the body is empty
        return told


def handler_of(endpoint: Endpoint) -> Handler:
    """An endpoint's handler. Its module is imported only now, because no process serves all endpoints."""
    return import_path(f"{endpoint.module}.{endpoint.name.lower()}")


def _response(made: Any) -> Response:
    if isinstance(made, Response):
        return made
    return Response() if made is None else JSON(made)


def answers(
    answer: type[BaseModel] | type[Response] | None,
    *,
    takes_rank: bool = False,
    has_images: Callable[[Any], bool] | None = None,
    **known: Any,
) -> Callable[[Callable[..., Any]], Handler]:
    """A decorator that makes a handler of a function. Its docstring is the operation's description.

    Args:
        answer: see `Handler.answer`.
        takes_rank: whether the header X-data-parallel-rank chooses a rank.
        has_images: see `Handler.has_images`.
        known: further fields of `Handler`.
    """

    def decorated(work: Callable[..., Any]) -> Handler:
        _, *own = inspect.signature(work, eval_str=True).parameters.values()
        body = next((each.annotation for each in own if each.name == "body"), None)
        told = inspect.getdoc(work) or ""
        signature = signature_of(own, takes_rank=takes_rank)
        return Handler(work, signature, told, answer, body=body, has_images=has_images, **known)

    return decorated


def runs(
    answer: type[BaseModel], *, has_images: Callable[[Any], bool] | None = None, **known: Any
) -> Callable[[Callable[..., Any]], Handler]:
    """A decorator for a function that makes a `Run` of a body: like `answers`, with the header that chooses a rank."""
    return answers(answer, takes_rank=True, has_images=has_images, is_run=True, **known)


def signature_of(parameters: Sequence[Parameter], *, takes_rank: bool = False) -> inspect.Signature:
    """What FastAPI reads of a request for a handler with these parameters."""
    keywords = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in parameters]
    return inspect.Signature([_REQUEST, *keywords, *([_RANK] if takes_rank else [])])
