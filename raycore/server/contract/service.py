"""What the handlers of an application get: the application's parts, and what a request says besides its body."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request

from raycore.parts.adapters.server.adapters import LoadsAdapters
from raycore.server.contract.engine import ServingEngine
from raycore.server.contract.models import Models
from raycore.server.dialects.responses.store import ResponseStore
from raycore.server.http.counts import HttpCounts
from raycore.server.http.streaming import EventStream
from raycore.server.options import ServerOptions
from raycore.server.protocol import Routed

T = TypeVar("T")


class RequestsInProgress:
    """How many of the requests that `Admission` counts are in progress in this process."""

    def __init__(self) -> None:
        self.count = 0


@dataclass(frozen=True)
class Service:
    """The parts of an application, or of a batch."""

    engine: ServingEngine
    options: ServerOptions
    models: Models
    adapters: LoadsAdapters | None = None
    """Loads and unloads LoRA adapters. None: the application can't."""
    response_store: ResponseStore | None = None
    """Where responses are stored. None: nowhere."""
    in_progress: RequestsInProgress = field(default_factory=RequestsInProgress)
    http_counts: HttpCounts = field(default_factory=HttpCounts)
    """What `/metrics` shows of this process's requests."""
    _own: dict[Callable[[Service], Any], Any] = field(default_factory=dict[Callable[["Service"], Any], Any])

    def own(self, kind: Callable[[Service], T]) -> T:
        """The application's own object of a class, which handlers share from one request to the next. It is made when
        it is first asked for, with the service as its argument."""
        return self._own.get(kind) or self._own.setdefault(kind, kind(self))


@dataclass(frozen=True, slots=True)
class Context:
    """What a handler gets with a request."""

    service: Service
    request_id: str | None = None
    """The id under which errors are logged. None: a batch has the request."""
    data_parallel_rank: int | None = None
    """The rank that the request's header has chosen. None: any rank."""
    request: Request | None = None
    """The HTTP request. None: a batch has it."""

    @property
    def http(self) -> Request:
        """The HTTP request, for handlers that batches don't have."""
        assert self.request is not None, "a batch has the request"
        return self.request

    @property
    def engine(self) -> ServingEngine:
        return self.service.engine

    @property
    def options(self) -> ServerOptions:
        return self.service.options

    @property
    def models(self) -> Models:
        return self.service.models

    def stream(self, events: AsyncGenerator[Any, None], *, has_names: bool = False) -> EventStream:
        """The response that sends these events. `has_names`: see `EventStream`."""
        return EventStream(events, has_names=has_names, keep_alive_s=self.options.sse_keep_alive_interval)

    def new_id(self, prefix: str, body: Routed) -> str:
        """The id of a request to the engine and of its response."""
        return f"{prefix}-{body.request_id or self.request_id or uuid.uuid4().hex}"
