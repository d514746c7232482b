"""The table of endpoints is all that the server, its middleware and batches serve."""

from __future__ import annotations

import asyncio

import pytest
from asgi_client import Client
from fastapi import FastAPI

from raycore.server import ServerOptions, build_app, load_adapters
from raycore.server.endpoints import Endpoint, Rule, paths_with


@pytest.fixture
def app(engine):
    options = ServerOptions(("fake",), api_keys=("secret",), enable_admin_endpoints=True)
    return build_app(engine, options, asyncio.run(load_adapters(engine, options)))


def test_the_application_serves_the_endpoints_of_the_table(app):
    of_fastapi = {route.path for route in FastAPI(redoc_url=None).routes}
    served = {(method, route.path) for route in app.routes if route.path not in of_fastapi for method in route.methods}
    assert served == {(endpoint.method, endpoint.path) for endpoint in Endpoint}


@pytest.mark.parametrize(
    ("rule", "paths"),
    [
        (Rule.NO_KEY, {"/health", "/ping", "/version", "/load", "/metrics"}),
        (Rule.NOT_COUNTED, {"/health", "/ping", "/version", "/load", "/metrics"}),
        (Rule.ADMISSION, {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"}),
        (Rule.TRACED, {"/v1/completions", "/v1/chat/completions"}),
        (Rule.IN_BATCHES, {"/v1/completions", "/v1/chat/completions"}),
    ],
)
def test_each_rule_holds_for_the_listed_paths(rule, paths):
    assert set(paths_with(rule)) == paths


@pytest.mark.parametrize("endpoint", Endpoint, ids=lambda endpoint: endpoint.name)
def test_only_endpoints_without_a_key_answer_requests_without_one(app, endpoint):
    answer = asyncio.run(Client(app).call(endpoint.method, endpoint.path))
    assert (answer.status != 401) == (Rule.NO_KEY in endpoint.rules)


@pytest.mark.parametrize("endpoint", Endpoint, ids=lambda endpoint: endpoint.name)
def test_the_openapi_document_describes_each_endpoint_and_its_responses(app, endpoint):
    described = app.openapi()["paths"][endpoint.path.replace(":path", "")][endpoint.method.lower()]
    assert described["description"], "the handler's docstring"
    assert all(content["schema"] for content in described["responses"]["200"].get("content", {}).values())
    assert ("401" in described["responses"]) == (Rule.NO_KEY not in endpoint.rules)


@pytest.mark.parametrize(
    "endpoint", [each for each in Endpoint if Rule.ADMISSION in each.rules], ids=lambda each: each.name
)
def test_endpoints_with_admission_refuse_requests_of_an_engine_that_is_unavailable(app, engine, endpoint):
    engine.unavailable_reason = "the engine is draining"
    answer = asyncio.run(Client(app, {"authorization": "Bearer secret"}).call(endpoint.method, endpoint.path, {}))
    assert answer.status == 503


def test_run_batch_takes_only_endpoints_with_posts():
    """The error for a line with another method says so, whatever the line's path is."""
    assert {endpoint.method for endpoint in Endpoint if Rule.IN_BATCHES in endpoint.rules} == {"POST"}
