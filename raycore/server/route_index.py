"""Finds a request's route by its path. Starlette asks one route after the other, which for the last of a server's
hundred takes longer than a short answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from starlette.routing import BaseRoute, Match, Route
from starlette.types import Receive, Scope, Send

from raycore.server.endpoints import path_of


class RouteIndex(BaseRoute):
    """Stands before all other routes, and takes the requests of those whose paths have no parameters."""

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        self._routes: dict[tuple[str, str], Route] = {}
        for route in routes:
            if isinstance(route, Route) and not route.param_convertors:
                for method in route.methods or ():
                    self._routes.setdefault((method, route.path), route)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """As the route of this method and path matches; as none if there is no such route."""
        route = self._routes.get((scope.get("method", ""), path_of(scope)))
        if route is None:
            return Match.NONE, {}
        match, found = route.matches(scope)
        return match, {**found, "route": route}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand the request to the route that `matches` has found."""
        route: Any = scope["route"]
        await route.handle(scope, receive, send)
