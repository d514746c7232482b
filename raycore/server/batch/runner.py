"""Runs the requests of a file through the same code as HTTP requests."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from pydantic import ValidationError

from raycore.errors import EngineDeadError
from raycore.plain_errors import decode_problem
from raycore.server.batch.files import NOT_JSON, RequestLine, Response, Result
from raycore.server.contract.engine import ServingEngine
from raycore.server.contract.handlers import Run, handler_of
from raycore.server.contract.models import Models
from raycore.server.contract.refusals import is_served, not_served
from raycore.server.contract.service import Context, Service
from raycore.server.endpoints import Rule, endpoints_with
from raycore.server.http.bodies import off_loop
from raycore.server.http.errors import APIError, as_api_error, invalid_body, unsupported
from raycore.server.http.ignored_fields import log_ignored, noting
from raycore.server.options import ServerOptions, limited_by

logger = logging.getLogger(__name__)

_ENDPOINTS = {endpoint.path: endpoint for endpoint in endpoints_with(Rule.IN_BATCHES)}


async def run_lines(
    engine: ServingEngine,
    options: ServerOptions,
    models: Models,
    lines: Iterator[RequestLine],
    on_result: Callable[[Result], object],
    *,
    max_concurrent: int,
    is_stopping: Callable[[], bool],
) -> None:
    """Run the requests in `lines`, `max_concurrent` at a time. `on_result` gets the results as requests end.

    An invalid line gets an error as its result. Once `is_stopping()` returns True, no more lines are started. Requests
    that the engine aborts or refuses after that get no result.

    Raises:
        EngineDeadError: the engine has failed. Lines without a result were not answered.
        Exception: whatever `on_result` raises.
    """
    service = Service(engine, limited_by(options, engine), models)

    async def work() -> None:
        while not is_stopping() and (line := next(lines, None)) is not None:
            try:
                result = await _answer(service, line)
            except EngineDeadError:
                if is_stopping():
                    return
                raise
            if result is not None and not (is_stopping() and _may_be_aborted(result)):
                on_result(result)

    workers = [asyncio.ensure_future(work()) for _ in range(max_concurrent)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


def _may_be_aborted(result: Result) -> bool:
    """Whether a request failed that the engine may just have aborted. The next run of the batch runs it again."""
    return result.error is not None and result.error["code"] == "request_failed"


class _Request(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


async def _answer(service: Service, line: RequestLine) -> Result | None:
    """Run a line's request and return the result; None if the request was aborted.

    Raises EngineDeadError if the engine has failed or is draining.
    """
    result_id = uuid.uuid4().hex
    try:
        request = _request(line)
    except APIError as error:
        failure = {"code": "invalid_line", "message": error.message}
        return Result(f"batch_req_{result_id}", line.custom_id, None, failure)
    try:
        with noting(service.options) as ignored:
            prepared = await off_loop(len(line.text), _prepare, service, request)
        log_ignored(request.url, ignored)
        body = await prepared.answer()
    except EngineDeadError:
        raise
    except Exception as error:  # any other error is the result of this request, as over HTTP
        told = as_api_error(error)
        if told.code == "request_aborted":
            return None
        if told.status == 500 and told is not error:
            logger.error("line %d (%r) failed", line.number, line.custom_id, exc_info=error)
        response = Response(told.status, f"req_{result_id}", told.body())
        failure = {"code": told.code or told.kind, "message": told.message}
        return Result(f"batch_req_{result_id}", line.custom_id, response, failure)
    if any(choice["finish_reason"] == "abort" for choice in body.get("choices", ())):
        return None
    return Result(f"batch_req_{result_id}", line.custom_id, Response(200, f"req_{result_id}", body), None)


def _request(line: RequestLine) -> _Request:
    """Decode a line. Raises APIError if the line isn't a valid request."""
    try:
        request = msgspec.json.decode(line.text, type=_Request)
    except NOT_JSON as error:
        raise APIError(400, f"line {line.number}: {decode_problem(error)}") from error
    if line.custom_id is None:
        raise APIError(400, f"line {line.number}: custom_id is empty")
    if request.method != "POST":
        raise APIError(400, f"line {line.number}: method {request.method!r} isn't supported; use 'POST'")
    path = _path(request.url)
    if path not in _ENDPOINTS:
        raise APIError(400, f"line {line.number}: url {request.url!r} isn't supported; use {' or '.join(_ENDPOINTS)}")
    request.url = path
    return request


def _path(url: str) -> str:
    """The endpoint's path in a whole URL, which may have a gateway's own path before it. Other texts as they are."""
    if not url.startswith(("http://", "https://")):
        return url
    whole = url.partition("?")[0]
    return max((path for path in _ENDPOINTS if whole.endswith(path)), key=len, default=url)


def _prepare(service: Service, request: _Request) -> Run:
    endpoint, spec = _ENDPOINTS[request.url], service.engine.pooling_spec
    if not is_served(endpoint, spec):
        raise not_served(endpoint, spec)
    handler = handler_of(endpoint)
    assert handler.body is not None, "each endpoint in batches has a body"
    try:
        body = handler.body.model_validate(request.body)
    except ValidationError as error:
        raise invalid_body(error.errors()) from error
    if getattr(body, "stream", None):
        raise unsupported("stream", "streaming isn't supported in batches")
    if getattr(body, "encoding_format", "float") not in ("float", "base64"):
        raise unsupported("encoding_format", "bytes aren't supported in batches: use float or base64")
    return (handler.in_batches or handler.work)(Context(service), body)
