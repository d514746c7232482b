"""The kinds of requests. Each module with a `KIND` is one: see `kind`."""

from __future__ import annotations

import importlib
import pkgutil
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from simulation.cluster.kinds.kind import Asked, Kind, tokens_of
from simulation.scenario import Request

_MODULES = [importlib.import_module(f"{__name__}.{each.name}") for each in pkgutil.iter_modules(__path__)]
KINDS: dict[str, Kind] = {module.KIND.name: module.KIND for module in _MODULES if hasattr(module, "KIND")}
"""By name, in the order of the modules' names."""
assert all(name in KINDS for kind in KINDS.values() for name in kind.excludes), "kinds exclude kinds that there are"


def drawn_for_engine(draw: random.Random, options: dict[str, Any]) -> tuple[list[Kind], dict[str, Any]]:
    """The kinds that an engine's requests may be of, and the options with what these need."""
    chosen: list[Kind] = []
    kinds = list(KINDS.values())
    draw.shuffle(kinds)
    for kind in kinds:
        own = kind.options(draw, options) if draw.random() < kind.engine_share else None
        if own is not None:
            chosen.append(kind)
            options = options | own
    return chosen, options


def drawn_for_request(
    draw: random.Random, request: Request, kinds: Sequence[Kind], options: Mapping[str, Any]
) -> Request:
    """The request with what it is of these kinds."""
    for kind in sorted(kinds, key=lambda each: -each.request_share):  # first what all requests have
        if any(other in kind.excludes or kind.name in KINDS[other].excludes for other in request.wants):
            continue
        value = kind.draw(draw, request, options) if draw.random() < kind.request_share else None
        if value is not None:
            request = msgspec.structs.replace(request, wants=request.wants | {kind.name: value})
    return request


def names_of(request: Request, options: Mapping[str, Any]) -> list[str]:
    """What a request is: at least one name."""
    return [kind.name for kind in KINDS.values() if kind.is_of(request, options)] or ["plain"]


def of(request: Request) -> Iterator[tuple[Kind, Any]]:
    """The kinds of which a request has data, with these."""
    for name, value in request.wants.items():
        yield KINDS[name], value


def asked(request: Request) -> Asked:
    """What the caller of a request asks."""
    params = {
        "n": request.n,
        "max_tokens": request.max_tokens,
        "temperature": 0.0 if request.seed is None else 1.0,
        "seed": request.seed,
        "detokenize": False,
    }
    made = Asked({"prompt_token_ids": tokens_of(request.prompt)}, params)
    for kind, value in of(request):
        kind.apply(value, request, made)
    return made
