"""What a server takes: sizes, numbers, keys."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from raycore.errors import InvalidConfig
from raycore.server import ServerOptions

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


def test_requests_beyond_max_concurrent_requests_get_429_and_retry_after(serve, engine):
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


def test_load_is_the_number_of_requests_in_progress(serve, engine):
    client = serve(api_keys=("secret",), max_streams=2)
    loads: list[int] = []

    async def note_load() -> None:
        loads.append((await client.call("GET", "/load")).json["server_load"])

    async def run():
        go_on = asyncio.Event()
        engine.at_token = lambda index: go_on.wait()
        with_key = {"authorization": "Bearer secret"}
        await note_load()
        body = {"prompt": "27 + 58 =", "stream": True}
        streams = [
            asyncio.ensure_future(client.call("POST", "/v1/completions", body, headers=with_key)) for _ in range(2)
        ]
        while engine.num_underway < 2:
            await asyncio.sleep(0)
        assert (await client.call("POST", "/v1/completions", body, headers=with_key)).status == 429
        await note_load()
        go_on.set()
        await asyncio.gather(*streams)
        await note_load()

    asyncio.run(run())
    assert loads == [0, 2, 0], "a refused request is not in progress"


def let_time_pass(seconds):
    """The running event loop's timers are due that much earlier."""
    loop = asyncio.get_running_loop()
    now_s = loop.time
    loop.time = lambda: now_s() + seconds


def test_a_body_that_never_comes_times_out_and_blocks_no_other_request(serve, engine):
    client = serve(max_streams=1, body_timeout_s=30)

    async def run():
        stalled = asyncio.ensure_future(client.call("POST", "/v1/completions", raw=[BODY[:5]], stalls=True))
        await asyncio.sleep(0)
        other = await client.call("POST", "/v1/completions", raw=[BODY])
        assert not stalled.done()
        let_time_pass(30)
        return other, await stalled

    other, stalled = asyncio.run(run())
    assert other.status == 200
    assert stalled.error == (408, "invalid_request_error", None)
    assert "30 s" in stalled.json["error"]["message"]
    assert stalled.headers["connection"] == "close"


def test_a_client_that_disconnects_during_its_body_starts_no_request(client, engine):
    answer = asyncio.run(client.call("POST", "/v1/completions", raw=[BODY[:5]], stalls=True, leave_after=0))
    assert answer.status == 499
    assert engine.params == []


def test_the_bytes_of_incoming_bodies_have_a_common_limit(serve):
    client = serve(max_body_bytes=100, body_timeout_s=30)

    async def run():
        calls = [
            asyncio.ensure_future(client.call("POST", "/v1/completions", raw=[b" " * 100], stalls=True))
            for _ in range(65)
        ]
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        let_time_pass(30)
        return await asyncio.gather(*calls), await client.call("POST", "/v1/completions", raw=[BODY])

    answers, later = asyncio.run(run())
    assert sorted(answer.status for answer in answers) == [408] * 64 + [429]
    assert later.status == 200


def test_an_api_key_is_needed_except_for_probes(serve):
    client = serve(api_keys=("one", "zwölf", "voilà"))
    for key in (None, "", "Bearer", "Bearer two", "one", "Basic one", "Bearer one two"):
        headers = {} if key is None else {"authorization": key}
        answer = client.post("/v1/completions", {"prompt": "1"}, headers=headers)
        assert answer.error == (401, "authentication_error", None)
        assert answer.json["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "one" not in answer.body.decode()
    for key in ("Bearer one", "bearer one", "Bearer zwölf", "Bearer \t one ", "Bearer voilà"):
        assert client.post("/v1/completions", {"prompt": "1"}, headers={"authorization": key}).status == 200
    assert client.get("/v1/models").status == 401
    assert client.get("/openapi.json").status == 401
    for path in ("/health", "/ping", "/version"):
        assert client.get(path).status == 200


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"api_keys": ("one", "")}, "API key 2"),
        ({"api_keys": ("secret\n",)}, "API key 1"),
        ({"max_body_bytes": 0}, "max_body_bytes=0"),
        ({"max_streams": 0}, "max_concurrent_requests=0"),
    ],
)
def test_invalid_limits_and_api_keys_are_refused_without_showing_the_key(options, named):
    with pytest.raises(InvalidConfig, match=named) as caught:
        ServerOptions(("fake",), **options)
    assert "secret" not in str(caught.value)


def asking(path, text):
    """A body for this path in which a client's text is `text`."""
    if path == "/v1/chat/completions":
        return {"messages": [{"role": "user", "content": text}]}
    return {"tokens": [5] * len(text)} if path == "/detokenize" else {"prompt": text}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(("num_characters", "is_on_loop"), [(100, True), (9000, False)])
def test_long_bodies_are_prepared_on_a_thread_of_their_own(
    client, engine, monkeypatch, path, num_characters, is_on_loop
):
    engine.max_model_len = 10_000
    tokenizer, threads = engine.get_tokenizer(), []

    def watched(method):
        def call(*args, **kwargs):
            threads.append(threading.current_thread())
            return method(*args, **kwargs)

        return call

    monkeypatch.setattr(tokenizer, "encode", watched(tokenizer.encode))
    monkeypatch.setattr(tokenizer, "decode_batch", watched(tokenizer.decode_batch))
    client.post(path, asking(path, "1" * num_characters))
    assert threads
    assert all((thread is threading.main_thread()) == is_on_loop for thread in threads)


@pytest.mark.parametrize(
    "path", ["/health", "/ping", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
)
def test_an_unavailable_engine_refuses_requests_with_503(client, engine, path):
    engine.unavailable_reason = "the engine is draining"
    answer = client.get(path) if path in ("/health", "/ping") else client.post(path, asking(path, "1"))
    assert answer.error == (503, "service_unavailable_error", None)
    assert "draining" in answer.json["error"]["message"]
    assert client.get("/v1/models").status == client.get("/version").status == 200
