"""Endpoints that a server doesn't have, for its model or its options: errors that say what to start instead."""

from __future__ import annotations

from collections.abc import Callable

from raycore.parts.pooling.models.pooling import PoolingSpec
from raycore.server.contract.service import Service
from raycore.server.endpoints import Endpoint, Rule, endpoints_with
from raycore.server.http.errors import APIError
from raycore.server.options import ServerOptions

_NEEDED = {
    Rule.EMBEDS: ("embed",),
    Rule.CLASSIFIES: ("classify",),
    Rule.SCORES: ("score", "embed", "token_embed"),
}
"""The tasks that an endpoint needs one of by its rule. /pooling serves any of them."""

_OPTIONS: dict[Rule, tuple[Callable[[ServerOptions], bool], str, str]] = {
    Rule.CONTROLS: (
        lambda options: options.enable_admin_endpoints,
        "enable_admin_endpoints",
        "--enable-admin-endpoints --api-key KEY",
    ),
    Rule.SHOWS_TOKENIZER: (
        lambda options: options.enable_tokenizer_info_endpoint,
        "enable_tokenizer_info_endpoint",
        "--enable-tokenizer-info-endpoint",
    ),
}
"""By rule: whether the option is on that an endpoint needs, its name, and the flags that turn it on."""


def is_served(endpoint: Endpoint, spec: PoolingSpec | None) -> bool:
    """Whether a model has an endpoint. `spec`: what the model pools. None: it generates."""
    if Rule.GENERATES in endpoint.rules:
        return spec is None
    if Rule.POOLS in endpoint.rules:
        needed = (tasks for rule, tasks in _NEEDED.items() if rule in endpoint.rules)
        return spec is not None and not any(set(tasks).isdisjoint(spec.tasks) for tasks in needed)
    return True


def not_served(endpoint: Endpoint, spec: PoolingSpec | None) -> APIError:
    """The error for a request to an endpoint that the model hasn't."""
    if spec is None:
        has = "this model generates text. For embeddings, classes and scores, start a server of a model that pools"
        advice = "raycore serve MODEL --runner pooling"
    else:
        served = [each.path for each in endpoints_with(Rule.POOLS) if is_served(each, spec)]
        has = f"this model pools ({', '.join(spec.tasks)}), and serves {', '.join(served)}. For {endpoint.path}, start"
        has += " a server of another model" if Rule.POOLS in endpoint.rules else " a server of a model that generates"
        pools = Rule.POOLS in endpoint.rules
        advice = f"raycore serve MODEL --runner {'pooling' if pools else 'generate'}"
    return _error(endpoint.path, f"{has}: {advice}")


def refusal(endpoint: Endpoint, service: Service) -> APIError | None:
    """The error for all requests to an endpoint that a server hasn't. None: it has it."""
    spec = service.engine.pooling_spec
    return not_served(endpoint, spec) if not is_served(endpoint, spec) else _turned_off(endpoint, service)


def no_documents(path: str) -> APIError:
    """The error for requests to the pages that describe the server, if it hasn't got them."""
    return _error(path, "the server was started with --disable-fastapi-docs")


def _turned_off(endpoint: Endpoint, service: Service) -> APIError | None:
    """The error for a request to an endpoint that the options leave out; None: they don't."""
    for rule, (is_on, option, flags) in _OPTIONS.items():
        if rule in endpoint.rules and not is_on(service.options):
            return _error(endpoint.path, f"{option} is off. Start the server with {flags}")
    if Rule.CHANGES_ADAPTERS in endpoint.rules and service.adapters is None:
        return _error(endpoint.path, "build_app() was called without `adapters`")
    return None


def _error(path: str, reason: str) -> APIError:
    return APIError(404, f"{path} isn't served: {reason}", code="unsupported_endpoint")
