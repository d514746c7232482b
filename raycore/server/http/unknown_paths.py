"""Requests to paths, or with methods, that the server doesn't have: errors that name what was probably meant."""

from __future__ import annotations

import re
from collections.abc import Iterator

from starlette.requests import Request
from starlette.routing import Route

from raycore.server.endpoints import path_of
from raycore.server.http.errors import APIError

_VERSION = re.compile(r"v\d+")
_MOST_PARTS = 4
"""More parts than any path of the server has."""


def unknown_path(request: Request) -> APIError:
    """The error for a request whose path isn't the server's."""
    told, meant = f"{request.method} {request.url.path}: there is no such path", _meant(request)
    return APIError(404, f"{told}. Is {meant} meant?" if meant else told)


def wrong_method(request: Request) -> tuple[APIError, str]:
    """The error for a request whose path doesn't have its method, and the header `Allow`."""
    routes = [each for each in _routes(request) if each.path_regex.match(path_of(request.scope))]
    allowed = ", ".join(sorted({method for each in routes for method in each.methods or ()}))
    return APIError(405, f"{request.method} {request.url.path}: this path takes {allowed}"), allowed


def _meant(request: Request) -> str | None:
    """The method and path that differ from those of a request only in slashes, versions, case, plural, or what precedes
    them."""
    known = {_key(each.path): each for each in reversed(list(_routes(request))) if "{" not in each.path}
    asked = _key(path_of(request.scope))[-_MOST_PARTS:]
    route = next((known[asked[start:]] for start in range(len(asked)) if asked[start:] in known), None)
    if route is None:
        return None
    prefix = request.scope.get("root_path", "")
    return f"{'/'.join(sorted((route.methods or set()) - {'HEAD'}))} {prefix}{route.path}"


def _key(path: str) -> tuple[str, ...]:
    parts = (part.lower() for part in path.split("/"))
    return tuple(part.rstrip("s") for part in parts if part and not _VERSION.fullmatch(part))


def _routes(request: Request) -> Iterator[Route]:
    return (each for each in request.app.routes if isinstance(each, Route))
