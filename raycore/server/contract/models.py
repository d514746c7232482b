"""What requests may name as their model: the names of the served model, and the adapters."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from raycore.lora.request import LoRARequest
from raycore.parts.adapters.server.adapters import OfferedAdapter
from raycore.server.http.errors import APIError

_MAX_NAMED = 20
"""Number of names in an error message."""


class RequestModel(NamedTuple):
    """The model of a request."""

    name: str
    """The name for the response."""
    lora: LoRARequest | None = None
    """The adapter that the request uses."""


class Models:
    """The models of one application. Thread-safe."""

    def __init__(self, served_names: Sequence[str]) -> None:
        self._served = {name: RequestModel(name) for name in served_names}
        self._default = next(iter(self._served.values()))
        self._adapters: dict[str, OfferedAdapter] = {}
        """By name. Replaced as a whole, so that other threads can read it meanwhile."""
        self._created = int(time.time())

    def set_adapters(self, adapters: Sequence[OfferedAdapter]) -> None:
        """Replace all adapters."""
        self._adapters = {adapter.request.lora_name: adapter for adapter in adapters}

    def find(self, name: str | None) -> RequestModel:
        """The model with this name; without a name, the served model under its first name.

        Raises APIError if there is none.
        """
        if not name:
            return self._default
        adapters = self._adapters
        if name in adapters:
            return RequestModel(name, adapters[name].request)
        if name not in self._served:
            raise self._not_found(name)
        return self._served[name]

    def listed(self) -> list[ListedModel]:
        """All models, the adapters last."""
        served = [ListedModel(name, self._created) for name in self._served]
        return served + [_listed(adapter) for adapter in self._adapters.values()]

    def look_up(self, name: str) -> ListedModel:
        """The model with this name. Raises APIError if there is none."""
        adapter = self._adapters.get(name)
        return _listed(adapter) if adapter is not None else ListedModel(self.find(name).name, self._created)

    def _names(self) -> Iterator[str]:
        yield from self._served
        yield from self._adapters

    def _not_found(self, name: str) -> APIError:
        named = list(islice(self._names(), _MAX_NAMED + 1))
        if len(named) > _MAX_NAMED:
            named[-1] = "… (see /v1/models)"
        return APIError(
            404,
            f"the model {name!r} doesn't exist; served here: {', '.join(named)}",
            param="model",
            code="model_not_found",
        )


class ListedModel(NamedTuple):
    """A model as `/v1/models` lists it."""

    name: str
    created: int
    """Unix time in seconds."""
    root: str | None = None
    """An adapter's path."""
    parent: str | None = None
    """The name of an adapter's model."""


def _listed(adapter: OfferedAdapter) -> ListedModel:
    return ListedModel(adapter.request.lora_name, adapter.created, adapter.request.lora_path, adapter.parent)
