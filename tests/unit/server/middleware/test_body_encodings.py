"""Bodies that are compressed, of another type, or in another character set."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import tracemalloc
import zlib
from typing import Any

import pytest
from asgi_client import Answer, Client

from raycore.server.middleware import body_encodings

BODY = json.dumps({"prompt": "27 + 58 ="}).encode()
PACKED = gzip.compress(BODY, mtime=0)  # the names of tests have it
FORM = "application/x-www-form-urlencoded"


def posted(client: Client, body: bytes, path: str = "/v1/completions", **headers: str | None) -> Answer:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return asyncio.run(client.call("POST", path, raw=[body], headers=named))


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (BODY, {"content_type": None}),
        (BODY, {"content_type": FORM}),
        (BODY, {"content_type": "text/plain; charset=ISO-8859-1"}),
        (BODY, {"content_type": "application/json; charset=latin-1"}),
        (BODY, {"content_type": "application/vnd.api+json"}),
        (BODY.decode().encode("utf-16"), {"content_type": "application/json; charset=utf-16"}),
        (BODY, {"content_encoding": "identity"}),
        (BODY, {"origin": "https://page.example"}),
        (PACKED, {"content_encoding": "gzip"}),
        (PACKED, {"content_encoding": " X-Gzip", "content_type": None}),
        (zlib.compress(BODY), {"content_encoding": "deflate"}),
    ],
)
def test_a_body_is_taken_as_json_as_its_headers_say(client: Client, body: bytes, headers: dict[str, Any]) -> None:
    answer = posted(client, body, **headers)
    assert (answer.status, answer.json["choices"][0]["text"]) == (200, " 85 is the answer")


LATIN = '{"prompt": "é"}'.encode("latin-1")


@pytest.mark.parametrize(
    ("body", "headers", "status", "words"),
    [
        (BODY, {"content_type": FORM, "origin": "https://page.example"}, 415, [FORM, "Content-Type: application/json"]),
        (
            BODY,
            {"content_type": None, "origin": "null"},
            415,
            ["the body of a web page", "Content-Type: application/json"],
        ),
        (BODY, {"content_type": "application/xml"}, 415, ["application/xml"]),
        (BODY, {"content_type": "multipart/form-data; boundary=a"}, 415, ["multipart/form-data"]),
        (BODY, {"content_type": "application/json;" + "a" * 300}, 415, ["317 characters", "256"]),
        (BODY, {"content_encoding": "br"}, 415, ["Content-Encoding 'br'", "gzip"]),
        (BODY, {"content_encoding": "gzip, gzip"}, 415, ["'gzip, gzip'"]),
        (LATIN, {"content_type": "application/json; charset=latin-1"}, 415, ["charset 'latin-1'", "UTF-8"]),
        (LATIN, {}, 400, ["isn't UTF-8", "at byte 12"]),
        (BODY, {"content_encoding": "gzip"}, 400, ["isn't gzip"]),
        (PACKED[:-9], {"content_encoding": "gzip"}, 400, ["isn't gzip", "cut short"]),
        (PACKED + b"more", {"content_encoding": "gzip"}, 400, ["isn't gzip", "goes on after its end"]),
        (b"prompt=1", {"content_type": FORM}, 400, ["isn't valid JSON"]),
    ],
)
def test_other_bodies_are_refused_by_name(
    client: Client, body: bytes, headers: dict[str, Any], status: int, words: list[str]
) -> None:
    answer = posted(client, body, **headers)
    assert answer.status == status
    assert all(word in answer.json["error"]["message"] for word in words), answer.json
    if status == 415:
        assert answer.headers is not None
        assert answer.headers["accept-encoding"] == "gzip, deflate"


def test_clients_of_anthropic_get_the_errors_of_its_api(client: Client) -> None:
    answer = posted(client, BODY, "/v1/messages", content_encoding="br")
    assert (answer.status, answer.json["type"], answer.json["error"]["type"]) == (415, "error", "invalid_request_error")


def test_a_small_body_cannot_become_a_large_one(serve: Any) -> None:
    client, bomb = serve(max_body_bytes=1 << 16), gzip.compress(b" " * (50 << 20))
    assert len(bomb) < 1 << 16
    tracemalloc.start()
    try:
        answer = posted(client, bomb, content_encoding="gzip")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert answer.error == (413, "invalid_request_error", None)
    assert most < 4 << 20


def test_the_limit_counts_the_body_without_compression(serve: Any) -> None:
    longest = b'{"prompt": "27 + 58 ="' + b" " * 999 + b"}"
    client = serve(max_body_bytes=len(longest))
    assert posted(client, gzip.compress(longest), content_encoding="gzip").status == 200
    assert posted(client, gzip.compress(longest + b" "), content_encoding="gzip").status == 413


def test_a_small_body_that_becomes_a_large_one_is_unpacked_on_another_thread(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = zlib.compress(json.dumps({"prompt": "27 + 58 =", "user": "a" * 1_000_000}).encode())
    assert len(packed) < 2_000
    threads: list[int] = []
    unpack = body_encodings._decompress

    def noted(*args: Any) -> bytes:
        threads.append(threading.get_ident())
        return unpack(*args)

    monkeypatch.setattr(body_encodings, "_decompress", noted)
    answer = posted(client, packed, content_encoding="deflate")
    assert answer.status == 200
    assert threads
    assert threading.get_ident() not in threads
