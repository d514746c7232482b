"""What a server takes: sizes, numbers, keys."""

from __future__ import annotations

import asyncio
import json

import pytest

BODY = json.dumps({"prompt": "27 + 58 ="}).encode()


def test_a_body_may_be_as_large_as_allowed_and_no_larger(serve, engine):
    for options in ({"max_body_bytes": len(BODY)}, {"max_body_bytes": len(BODY) - 1}):
        client = serve(**options)
        said = client.complete()
        unsaid = client.post("/v1/completions", raw=[BODY[:10], BODY[10:]])
        if options["max_body_bytes"] == len(BODY):
            assert (said.status, unsaid.status) == (200, 200)
        else:
            for answer in (said, unsaid):
                assert answer.error == (413, "invalid_request_error", None)
                assert str(len(BODY) - 1) in answer.json["error"]["message"]
    assert len(engine.params) == 2


def test_requests_beyond_the_limit_are_told_to_come_again(serve, engine):
    client = serve(max_streams=2)

    async def run():
        go_on = asyncio.Event()
        engine.at_token = lambda index: go_on.wait()
        body = {"prompt": "27 + 58 =", "stream": True}
        first = [asyncio.ensure_future(client.call("POST", "/v1/completions", body)) for _ in range(2)]
        while engine.num_underway < 2:
            await asyncio.sleep(0)
        refused = await client.call("POST", "/v1/completions", body)
        models = await client.call("GET", "/v1/models")
        go_on.set()
        return refused, models, await asyncio.gather(*first), await client.call("POST", "/v1/completions", body)

    refused, models, first, later = asyncio.run(run())
    assert refused.error == (429, "rate_limit_error", None)
    assert refused.headers["retry-after"] == "1"
    assert models.status == 200
    assert [answer.status for answer in (*first, later)] == [200, 200, 200]


def test_a_key_is_needed_but_for_probes(serve):
    client = serve(api_keys=("one", "zwölf"))
    for key in (None, "", "Bearer", "Bearer two", "one", "Basic one", "Bearer one two"):
        headers = {} if key is None else {"authorization": key}
        answer = client.post("/v1/completions", {"prompt": "1"}, headers=headers)
        assert answer.error == (401, "authentication_error", None)
        assert answer.json["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "one" not in answer.body.decode()
    for key in ("Bearer one", "bearer one", "Bearer zwölf"):
        assert client.post("/v1/completions", {"prompt": "1"}, headers={"authorization": key}).status == 200
    assert client.get("/v1/models").status == 401
    assert client.get("/openapi.json").status == 401
    for path in ("/health", "/ping", "/version"):
        assert client.get(path).status == 200


@pytest.mark.parametrize("path", ["/health", "/ping", "/v1/completions", "/v1/chat/completions"])
def test_an_engine_in_trouble_takes_nothing(client, engine, path):
    engine.trouble = "the engine is draining"
    body = {"prompt": "1"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "1"}]}
    answer = client.post(path, body) if path.startswith("/v1") else client.get(path)
    assert answer.error == (503, "service_unavailable_error", None)
    assert "draining" in answer.json["error"]["message"]
    assert client.get("/v1/models").status == client.get("/version").status == 200
