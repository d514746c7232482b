"""Which rank computes a request, and what it is told of blocks on other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from raycore.client.routing import Router
from raycore.messages import CacheChanges, EngineRequest


class Route(NamedTuple):
    """Where a request goes."""

    rank: int
    hints: dict[str, Any] | None = None
    """The request's `hints`."""
    hands_over: bool = False
    """Whether the rank computes only the prompt and a token, and another one goes on."""


class Routes:
    """One client's routes. These are the router's: ranks say nothing of their blocks. Not thread-safe.

    `RequestTable` makes the calls, with the client's lock held. Where ranks read each other's blocks, a subclass
    answers (`raycore.parts.transfers.client.routes`).
    """

    def __init__(self, router: Router) -> None:
        self._router = router

    def add_rank(self, dp_rank: int, addresses: Sequence[str]) -> None:
        """Note how workers of other ranks reach those of this one. Called when a rank comes into service."""

    def take(self, dp_rank: int, changes: CacheChanges) -> None:
        """Note which blocks a rank holds. Called with what its batches say of that."""

    def route(self, request: EngineRequest, cache_salt: str | None, wanted_rank: int | None) -> Route:
        """Choose the rank of a request. Called when it is sent. At least one rank is in service.

        Args:
            request: its first unfinished sequence.
            cache_salt: the same for requests that can share cached prefixes.
            wanted_rank: the rank that the caller asked for.
        """
        return Route(self._router.place(request.prompt_token_ids, cache_salt=cache_salt, rank=wanted_rank).rank)

    def route_on(self, request: EngineRequest, cache_salt: str | None, hints: dict[str, Any] | None) -> Route:
        """Choose the rank that continues a request, once a rank of a route that `hands_over` has computed its prompt.

        `hints`: what the other rank said of its blocks.
        """
        return self.route(request, cache_salt, None)
