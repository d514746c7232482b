"""The ids of requests: in headers, in the engine, in logs and errors."""

import logging
import re

import pytest
from asgi_client import Client
from fake_engine import FakeEngine

from raycore.errors import RaycoreError
from raycore.server import ServerOptions, build_app


@pytest.mark.parametrize("given", ["a", "trace-1/2:3", "x" * 128])
def test_the_request_id_header_is_returned(client: Client, engine: FakeEngine, given: str) -> None:
    headers = {"X-Request-Id": given}
    for answer in (client.complete(headers), client.chat(headers), client.complete(headers, stream=True)):
        assert answer.headers["x-request-id"] == given
    assert all(re.fullmatch(rf"(cmpl|chatcmpl)-{given}-[0-9a-f]{{8}}", each) for each in engine.request_ids)
    assert len(set(engine.request_ids)) == 3
    own = client.complete(headers, request_id="mine")
    assert (own.headers["x-request-id"], own.json["id"]) == (given, "cmpl-mine")


@pytest.mark.parametrize("given", [None, "", "a b", "x" * 129, "\x7f", "\xe9"])
def test_a_request_without_a_usable_id_header_gets_a_new_id(
    client: Client, engine: FakeEngine, given: str | None
) -> None:
    answer = client.complete({"X-Request-Id": given})
    assert answer.headers is not None
    assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])
    assert engine.request_ids == [f"cmpl-{answer.headers['x-request-id']}"]


def test_error_answers_and_the_log_have_the_request_id(
    serve, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    headers: dict[str, str | None] = {"X-Request-Id": "abc"}
    client = serve(api_keys=("k",))
    assert client.complete(headers).status == 401
    client = serve()

    def fail(index: int) -> None:
        raise RaycoreError("no luck")

    for answer in (client.complete(headers, n=0), client.post("/v1/nothing", {}, headers=headers)):
        assert answer.status >= 400
        assert answer.headers["x-request-id"] == "abc"
    engine.at_token = fail
    with caplog.at_level(logging.ERROR):
        for is_stream in (False, True):
            answer = client.complete(headers, stream=is_stream)
            assert answer.status == 500
            assert answer.headers["x-request-id"] == "abc"
            logged = re.search(r"\(request (abc-[0-9a-f]{8})\)", answer.json["error"]["message"])
            assert logged is not None
            assert logged[1] in caplog.text


def test_an_unexpected_server_error_has_the_request_id(engine: FakeEngine) -> None:
    app, sent = build_app(engine, ServerOptions(("fake",))), []

    async def watched(scope, receive, send) -> None:
        async def note(message) -> None:
            sent.append(message)
            await send(message)

        await app(scope, receive, note)

    def fail(index: int) -> None:
        raise ZeroDivisionError

    engine.at_token = fail
    with pytest.raises(ZeroDivisionError):
        Client(watched).complete({"X-Request-Id": "abc"})
    assert sent[0]["status"] == 500
    assert (b"x-request-id", b"abc") in sent[0]["headers"]


def test_an_error_event_in_a_stream_has_the_request_id(
    client: Client, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(index: int) -> None:
        if index:
            raise ZeroDivisionError

    engine.at_token = fail
    answer = client.complete({"X-Request-Id": "abc"}, stream=True)
    assert answer.status == 200
    found = re.search(r"\(request (abc-[0-9a-f]{8})\)", answer.events[-1]["error"]["message"])
    assert found is not None
    assert f"a stream failed, request {found[1]}" in caplog.text


def test_ray_serve_adds_the_header_itself(engine: FakeEngine) -> None:
    client = Client(build_app(engine, ServerOptions(("fake",)), returns_request_ids=False))
    answer = client.complete({"X-Request-Id": "abc"})
    assert "x-request-id" not in answer.headers
    assert engine.request_ids[0].startswith("cmpl-abc-")
