"""Paths that the server lacks, methods that its paths lack, and HEAD."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from asgi_client import Client

from raycore.server.endpoints import Endpoint
from raycore.server.http_options import HttpOptions


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("/v1/v1/chat/completions", "POST /v1/chat/completions"),
        ("//v1/models", "GET /v1/models"),
        ("/v1//models", "GET /v1/models"),
        ("/v1/models/", "GET /v1/models"),
        ("/chat/completions", "POST /v1/chat/completions"),
        ("/V1/Chat/Completion/", "POST /v1/chat/completions"),
        ("/openai/v1/responses", "POST /v1/responses"),
        ("/v1/v1/messages", "POST /v1/messages"),
        ("/v1/health", "GET /health"),
        ("/v1/rerank/", "POST /v1/rerank"),
        ("/a" * 20_000 + "/tokenize", "POST /tokenize"),
    ],
)
def test_an_unknown_path_names_the_one_that_is_meant(client: Client, asked: str, meant: str) -> None:
    method = meant.partition(" ")[0]
    answer = asyncio.run(client.call(method, asked))
    if answer.status == 307:  # the router sends requests with one slash too many to the right path
        assert answer.headers is not None
        assert answer.headers["location"].endswith(meant.partition(" ")[2])
        return
    assert answer.status == 404
    assert answer.json["error"]["message"] == f"{method} {asked}: there is no such path. Is {meant} meant?"


@pytest.mark.parametrize("asked", ["/v1/v1/messages", "/v1/v1/messages/count_tokens"])
def test_a_client_of_anthropics_api_is_told_in_its_form(client: Client, asked: str) -> None:
    error = client.post(asked).json
    assert (error["type"], error["error"]["type"]) == ("error", "not_found_error")
    assert f"Is POST {asked.removeprefix('/v1')} meant?" in error["error"]["message"]


@pytest.mark.parametrize("asked", ["/", "/v1", "/v1/nothing", "/v1/responses/a/b", "/{model:path}"])
def test_other_unknown_paths_are_only_named(client: Client, asked: str) -> None:
    assert client.get(asked).json["error"]["message"] == f"GET {asked}: there is no such path"


def test_the_path_that_is_meant_has_the_prefix_of_the_proxy(serve: Any) -> None:
    client = serve(http=HttpOptions(root_path="/api"))
    message = client.post("/api/chat/completions").json["error"]["message"]
    assert message == "POST /api/chat/completions: there is no such path. Is POST /api/v1/chat/completions meant?"
    assert asyncio.run(client.call("HEAD", "/api/v1/models")).status == 200


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", "POST"),
        ("HEAD", "/v1/completions", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("PUT", "/ping", "GET, HEAD, POST"),
        ("GET", "/v1/messages", "POST"),
    ],
)
def test_a_wrong_method_is_told_the_right_ones_once(client: Client, method: str, path: str, allowed: str) -> None:
    answer = asyncio.run(client.call(method, path))
    assert answer.headers is not None
    assert (answer.status, answer.headers["allow"]) == (405, allowed)
    assert {name.lower() for name in answer.headers} == set(answer.headers), "a header in capitals is sent twice"
    assert answer.json["error"]["message"] == f"{method} {path}: this path takes {allowed}"


@pytest.mark.parametrize(
    "endpoint", [each for each in Endpoint if each.method == "GET" and "{" not in each.path], ids=lambda each: each.name
)
def test_head_is_served_where_get_is(serve: Any, endpoint: Endpoint) -> None:
    client = serve(api_keys=("k",), enable_admin_endpoints=True, enable_tokenizer_info_endpoint=True)

    def ask(method: str) -> Any:
        return asyncio.run(client.call(method, endpoint.path, headers={"authorization": "Bearer k"}))

    head, get = ask("HEAD"), ask("GET")
    assert head.status == get.status != 405
    assert head.headers.keys() == get.headers.keys()


def test_the_document_describes_no_head(client: Client) -> None:
    assert not any("head" in methods for methods in client.get("/openapi.json").json["paths"].values())
