"""Makes the OpenAPI document."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from raycore.server.contract.engine import ServingEngine
from raycore.server.endpoints import Rule, endpoints_with
from raycore.server.openapi.value_ranges import add_ranges
from raycore.server.options import ServerOptions

_UNUSED_SCHEMAS = ("HTTPValidationError", "ValidationError")


def describe(app: FastAPI, options: ServerOptions, engine: ServingEngine) -> dict[str, Any]:
    """The OpenAPI document: FastAPI's, with this server's value ranges and API key scheme.

    Status 422, which this server never sends, is removed.
    """
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    for methods in document["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("422", None)
            for parameter in operation.get("parameters", ()):
                _drop_null(parameter["schema"])
    schemas = document["components"]["schemas"]
    for name in _UNUSED_SCHEMAS:
        schemas.pop(name, None)
    add_ranges(schemas, options, engine)
    if options.api_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
        for endpoint in endpoints_with(Rule.NO_KEY):
            document["paths"][endpoint.path][endpoint.method.lower()]["security"] = []
    return document


def _drop_null(schema: dict[str, Any]) -> None:
    """Remove null from a parameter's values: text of a header, a path or a query can't be null, only be left out."""
    others = [each for each in schema.get("anyOf", ()) if each != {"type": "null"}]
    if len(others) == 1:
        del schema["anyOf"]
        schema |= others[0]
