"""The table of endpoints is all that the server, its middleware and batches serve."""

from __future__ import annotations

import asyncio

import pytest
from asgi_client import Client
from fake_engine import CLASSIFIES, EMBEDS, SCORES, FakeEngine
from fastapi import FastAPI
from fastapi.routing import APIRoute

from raycore.errors import WeightVersionChanged
from raycore.server import ServerOptions, build_app, load_adapters
from raycore.server.contract.refusals import is_served
from raycore.server.endpoints import Endpoint, Rule, paths_with
from raycore.server.http_options import HttpOptions

KINDS = {"generates": None, "embeds": EMBEDS, "classifies": CLASSIFIES, "scores": SCORES}
"""Models, by what they do."""


def app_of(engine: FakeEngine) -> FastAPI:
    options = ServerOptions(
        ("fake",), api_keys=("secret",), enable_admin_endpoints=True, enable_tokenizer_info_endpoint=True
    )
    return build_app(engine, options, asyncio.run(load_adapters(engine, options)))


@pytest.fixture
def app(engine):
    return app_of(engine)


@pytest.mark.parametrize("spec", KINDS.values(), ids=KINDS)
def test_the_application_serves_the_endpoints_of_the_table(spec):
    of_fastapi = {route.path for route in FastAPI(redoc_url=None).routes}
    routes = app_of(FakeEngine(pooling=spec)).routes
    served = [(method, route.path) for route in routes if route.path not in of_fastapi for method in route.methods]
    heads = [("HEAD", endpoint.path) for endpoint in Endpoint if endpoint.method == "GET"]
    assert sorted(served) == sorted(heads + [(endpoint.method, endpoint.path) for endpoint in Endpoint])


TOKENIZING = {
    "/v1/messages/count_tokens",
    "/v1/messages/render",
    "/v1/responses/render",
    "/v1/chat/completions/render",
    "/v1/completions/render",
    "/v1/chat/completions/derender",
    "/v1/completions/derender",
}
"""Of models that generate."""
IN_BATCHES = {"/v1/completions", "/v1/chat/completions", "/v1/responses"}
RUNNING = {*IN_BATCHES, "/v1/chat/completions/batch", "/v1/messages", "/inference/v1/generate"}
GENERATING = RUNNING | TOKENIZING
STORED = {"/v1/responses/{response_id}" + rest for rest in ("", "/cancel", "/input_items")}
SCORING = {"/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"}
POOLING = {"/v1/embeddings", "/v2/embed", "/classify", "/pooling", *SCORING}


@pytest.mark.parametrize(
    ("rule", "paths"),
    [
        (Rule.NO_KEY, {"/health", "/ping", "/version", "/load", "/metrics"}),
        (Rule.NOT_COUNTED, {"/health", "/ping", "/version", "/load", "/metrics"}),
        (Rule.ADMISSION, {"/tokenize", "/detokenize", *GENERATING, *POOLING}),
        (Rule.TRACED, RUNNING | POOLING),
        (Rule.GENERATES, GENERATING | STORED | {"/inference/v1/abort_requests"}),
        (Rule.POOLS, POOLING),
        (Rule.IN_BATCHES, IN_BATCHES | POOLING),
    ],
)
def test_each_rule_holds_for_the_listed_paths(rule, paths):
    assert set(paths_with(rule)) == paths


@pytest.mark.parametrize(
    ("kind", "refused", "words"),
    [
        ("generates", POOLING, ["this model generates text", "raycore serve MODEL --runner pooling"]),
        (
            "embeds",
            GENERATING,
            ["(embed, token_embed)", "/score", "raycore serve MODEL --runner generate"],
        ),
        ("embeds", {"/classify"}, ["this model pools (embed, token_embed)", "raycore serve MODEL --runner pooling"]),
        (
            "classifies",
            {"/v1/embeddings", "/v2/embed", *SCORING},
            ["(classify, token_classify)", "serves /classify"],
        ),
        ("scores", {"/v1/embeddings", "/v2/embed"}, ["(score, classify)", "/v1/rerank"]),
    ],
)
def test_what_a_model_has_not_got_says_what_to_start_instead(kind, refused, words):
    app = app_of(FakeEngine(pooling=KINDS[kind]))
    for path in refused:
        answer = Client(app, {"authorization": "Bearer secret"}).post(path, {"input": "a"})
        if path.startswith("/v1/messages"):
            assert (answer.status, answer.json["error"]["type"]) == (404, "not_found_error")
        else:
            assert answer.error == (404, "invalid_request_error", None)
        assert all(word in answer.json["error"]["message"] for word in [path, *words]), answer.json
        assert path not in app.openapi()["paths"]


def test_what_an_option_turns_off_names_the_flag(engine):
    client = Client(build_app(engine, ServerOptions(("fake",), http=HttpOptions(disable_fastapi_docs=True))))
    for path, flag in (
        ("/tokenizer_info", "--enable-tokenizer-info-endpoint"),
        ("/server_info", "--enable-admin-endpoints"),
        ("/docs", "--disable-fastapi-docs"),
        ("/openapi.json", "--disable-fastapi-docs"),
    ):
        answer = client.get(path)
        assert answer.error == (404, "invalid_request_error", None)
        assert path in answer.json["error"]["message"]
        assert flag in answer.json["error"]["message"]


@pytest.mark.parametrize("endpoint", Endpoint, ids=lambda endpoint: endpoint.name)
def test_only_endpoints_without_a_key_answer_requests_without_one(app, endpoint):
    answer = asyncio.run(Client(app).call(endpoint.method, endpoint.path))
    assert (answer.status != 401) == (Rule.NO_KEY in endpoint.rules)


@pytest.mark.parametrize("spec", KINDS.values(), ids=KINDS)
def test_the_openapi_document_describes_each_endpoint_and_its_responses(spec):
    paths = app_of(FakeEngine(pooling=spec)).openapi()["paths"]
    for endpoint in (each for each in Endpoint if is_served(each, spec)):
        described = paths[endpoint.path.replace(":path", "")][endpoint.method.lower()]
        assert described["description"], "the handler's docstring"
        assert all(content["schema"] for content in described["responses"]["200"].get("content", {}).values())
        assert ("401" in described["responses"]) == (Rule.NO_KEY not in endpoint.rules)
        assert ({"408", "413", "415"} <= described["responses"].keys()) == (endpoint.method == "POST")
        assert described.get("security") == ([] if Rule.NO_KEY in endpoint.rules else None)


CHAT = [{"role": "user", "content": "1"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "1"}),
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/chat/completions/batch", {"messages": [CHAT, CHAT]}),
        ("/v1/responses", {"input": "1"}),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"on_version_change": "fail"}}),
        ("/invocations", {"prompt": "1"}),
    ],
)
def test_a_request_that_fails_because_of_new_weights_has_a_status_of_the_openapi_document(app, engine, path, body):
    def change_weights(index):
        raise WeightVersionChanged("the weights changed")

    engine.at_token = change_weights
    answer = Client(app, {"authorization": "Bearer secret"}).post(path, {"on_version_change": "fail"} | body)
    assert (answer.status, answer.json["error"]["code"]) == (409, "weight_version_changed")
    assert "409" in app.openapi()["paths"][path]["post"]["responses"]


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


def test_a_method_that_a_path_lacks_is_refused_with_those_that_it_has(app):
    answer = asyncio.run(Client(app, {"authorization": "Bearer secret"}).call("PUT", "/v1/responses/a"))
    assert (answer.status, answer.headers["allow"]) == (405, "DELETE, GET, HEAD")


@pytest.mark.parametrize("endpoint", [each for each in Endpoint if "{" not in each.path], ids=lambda each: each.path)
def test_only_the_route_of_a_path_without_parameters_is_asked(app, endpoint, monkeypatch):
    """Each route that is asked in vain would cost every request some microseconds."""
    asked = []
    matches = APIRoute.matches
    monkeypatch.setattr(APIRoute, "matches", lambda route, scope: asked.append(route.path) or matches(route, scope))
    asyncio.run(Client(app, {"authorization": "Bearer secret"}).call(endpoint.method, endpoint.path, {}))
    assert set(asked) <= {endpoint.path}
    assert len(asked) <= 1
