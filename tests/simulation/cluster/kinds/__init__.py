"""The kinds of requests. Each module with a `KIND` is one: see `kind`."""

from __future__ import annotations

import importlib
import pkgutil
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from simulation.cluster.kinds.kind import Asked, Kind, tokens_of
from simulation.scenario import Request, Scenario

_MODULES = [importlib.import_module(f"{__name__}.{each.name}") for each in pkgutil.iter_modules(__path__)]
KINDS: dict[str, Kind] = {module.KIND.name: module.KIND for module in _MODULES if hasattr(module, "KIND")}
"""By name, in the order of the modules' names."""
assert all(name in KINDS for kind in KINDS.values() for name in kind.excludes), "kinds exclude kinds that there are"
_TOGETHER = (
    "aborted", "adapter", "added", "allowed tokens", "bad words", "cache salt", "constraint", "drafts", "embeddings",
    "hidden states", "logprobs", "min tokens", "output kind", "pieces", "pooled", "prompt logprobs", "refused", "n",
    "stop tokens", "streamed",
)  # fmt: skip
"""Kinds that plain engines draw from the scenario's generator, one after the other: the first ones that there were."""
APART = tuple(name for name in KINDS if name not in _TOGETHER)
"""The others. Each draws from a generator of its own, so that seeds keep their stories when one is added."""
_NO_KINDS_SHARE = 0.5
"""Of the engines of deployments: their requests are plain, so that these are looked at, too."""


def drawn_for_engine(draw: random.Random, options: dict[str, Any]) -> tuple[list[Kind], dict[str, Any]]:
    """The kinds that a plain engine's requests may be of, and the options with what these need."""
    chosen: list[Kind] = []
    kinds = [KINDS[name] for name in _TOGETHER]
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


def with_kinds(scenario: Scenario, names: Iterable[str]) -> Scenario:
    """The scenario with what requests have of these kinds, and with what operators do and what breaks because of it."""
    for kind in sorted((KINDS[name] for name in names), key=lambda each: -each.request_share):
        draw = random.Random(f"{kind.name} {scenario.seed}")
        own = kind.options(draw, scenario.options) if draw.random() < kind.engine_share else None
        if own is None:
            continue
        options = scenario.options | own
        requests = tuple(drawn_for_request(draw, each, [kind], options) for each in scenario.requests)
        operations = sorted([*scenario.operations, *kind.operations(draw, requests)], key=lambda each: each.at_s)
        scenario = msgspec.structs.replace(
            scenario,
            options=options,
            requests=requests,
            operations=tuple(operations),
            faults=(*scenario.faults, *kind.faults(draw, requests, options)),
        )
    return scenario


def with_kinds_of_deployment(scenario: Scenario, lacks: Collection[str]) -> Scenario:
    """As `with_kinds`, for the kinds that the requests of a deployment may be of: all but some."""
    is_plain = random.Random(f"kinds {scenario.seed}").random() < _NO_KINDS_SHARE
    return scenario if is_plain else with_kinds(scenario, [name for name in KINDS if name not in lacks])


def names_of(request: Request, options: Mapping[str, Any]) -> list[str]:
    """What a request is: at least one name."""
    return [kind.name for kind in KINDS.values() if kind.is_of(request, options)] or ["plain"]


def of(request: Request) -> Iterator[tuple[Kind, Any]]:
    """The kinds of which a request has data, with these."""
    for name, value in request.wants.items():
        yield KINDS[name], value


def waits_s(request: Request) -> float:
    """For how many seconds the caller of a request lets it wait."""
    return sum(kind.waits_s(value) for kind, value in of(request))


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
