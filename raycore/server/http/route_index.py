"""Finds a request's route by its path.

Starlette asks one route after the other. With the hundred routes of a server, that takes longer than a short answer.
"""

from __future__ import annotations

from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from raycore.server.endpoints import path_of


class RouteIndex:
    """Hands requests to the routes of a router whose paths have no parameters, and all others to the router."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._routes: dict[tuple[str, str], Route] = {}
        for route in router.routes:
            if isinstance(route, Route) and not route.param_convertors:
                for method in route.methods or ():
                    self._routes.setdefault((method, route.path), route)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get((scope.get("method", ""), path_of(scope))) if scope["type"] == "http" else None
        if route is None:
            await self._router.app(scope, receive, send)
            return
        _, found = route.matches(scope)
        scope.update({"router": self._router, "route": route, **found})
        await route.handle(scope, receive, send)
