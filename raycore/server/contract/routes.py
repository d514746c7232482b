"""Adds the endpoints of the table to an application: their handlers, or errors for those that it hasn't."""

from __future__ import annotations

from typing import NoReturn

from fastapi import FastAPI
from starlette.requests import Request
from starlette.routing import Route

from raycore.server.contract.handlers import handler_of
from raycore.server.contract.refusals import no_documents, refusal
from raycore.server.contract.service import Service
from raycore.server.endpoints import Endpoint
from raycore.server.http.errors import APIError


def add_endpoints(app: FastAPI, service: Service) -> None:
    """Add all endpoints, in the order of the table."""
    for endpoint in Endpoint:
        error = refusal(endpoint, service)
        if error is None:
            _add(app, endpoint, service)
        else:
            _refuse(app, endpoint.method, endpoint.path, error)
    if service.options.http.disable_fastapi_docs:
        for path in ("/docs", "/openapi.json"):
            _refuse(app, "GET", path, no_documents(path))


def _add(app: FastAPI, endpoint: Endpoint, service: Service) -> None:
    handler = handler_of(endpoint)
    handle, described = handler.bound(service), handler.described(endpoint)
    app.add_api_route(endpoint.path, handle, methods=[endpoint.method], **described)
    if endpoint.method == "GET":
        # load balancers and `wget --spider` ask with HEAD. The HTTP server leaves the body out
        app.add_api_route(endpoint.path, handle, methods=["HEAD"], **described, include_in_schema=False)


def _refuse(app: FastAPI, method: str, path: str, error: APIError) -> None:
    async def refused(_: Request) -> NoReturn:
        raise error.with_traceback(None)

    # a route of FastAPI's own would have it look for parameters: for all of these, a fifth of an application's start
    app.router.routes.append(Route(path, refused, methods=[method], include_in_schema=False))
