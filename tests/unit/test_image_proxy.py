"""The example's proxy has images encoded before an engine gets the request, and needs no encoder to answer."""

from __future__ import annotations

import asyncio
import runpy
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

PROXY = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "image_proxy.py"))
FIRST, SECOND = ({"type": "image_url", "image_url": {"url": f"data:{each}"}} for each in "ab")
TEXT = {"type": "text", "text": "What is this?"}
MESSAGES = [{"role": "system", "content": "See."}, {"role": "user", "content": [FIRST, TEXT, SECOND]}]


class Backend:
    """Notes what it is asked, with the others', and answers with a status."""

    def __init__(self, name: str, log: list[tuple[str, Any]], status: int = 200) -> None:
        self._name, self._log, self._status = name, log, status

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        self._log.append((self._name, body))
        assert request.headers["Authorization"] == "Bearer key"
        response = web.StreamResponse(status=self._status, headers={"X-Own": request.path_qs})
        await response.prepare(request)
        for chunk in (b"data: 1\n\n", b"data: 2\n\n"):
            await response.write(chunk)
        return response


async def asked(path: str, body: Any, encoder_status: int | None = 200) -> tuple[Any, list[tuple[str, Any]]]:
    """Ask the proxy. `encoder_status` None: there is no encoder any more."""
    log: list[tuple[str, Any]] = []
    urls: list[str] = []
    servers: list[TestServer] = []
    for name, status in (("encoder", encoder_status or 200), ("engine", 200)):
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", Backend(name, log, status).answer)
        servers.append(TestServer(app))
        await servers[-1].start_server()
        urls.append(str(servers[-1].make_url("")).rstrip("/"))
    if encoder_status is None:
        await servers[0].close()
    async with TestClient(TestServer(PROXY["make_app"]([urls[0]], [urls[1]]))) as client:
        method = "GET" if body is None else "POST"
        answer = await client.request(method, path, json=body, headers={"Authorization": "Bearer key"})
        found = answer.status, answer.headers["X-Own"], await answer.read()
    for each in servers:
        await each.close()
    return found, log


STREAM = b"data: 1\n\ndata: 2\n\n"


@pytest.mark.parametrize("encoder_status", [200, 500, None])
def test_each_image_is_encoded_before_the_engine_is_asked_if_there_is_an_encoder(encoder_status: int | None) -> None:
    body = {"model": "m", "messages": MESSAGES, "max_tokens": 50, "logprobs": True, "mm_processor_kwargs": {"a": 1}}
    found, log = asyncio.run(asked("/v1/chat/completions", body, encoder_status))
    assert found == (200, "/v1/chat/completions", STREAM)
    assert log[-1] == ("engine", body)
    encoded = [
        ("encoder", {**own, "messages": [{"role": "user", "content": [part]}], "max_tokens": 1})
        for own in [{"model": "m", "mm_processor_kwargs": {"a": 1}}]
        for part in (FIRST, SECOND)
    ]
    assert sorted(map(str, log[:-1])) == sorted(map(str, encoded if encoder_status else []))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/models?a=b", None),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}, None, {"content": [3]}]}),
        ("/v1/chat/completions", {"messages": 3}),
        ("/v1/chat/completions", ["messages"]),
    ],
)
def test_what_has_no_images_goes_to_the_engine_at_once(path: str, body: Any) -> None:
    assert asyncio.run(asked(path, body)) == ((200, path, STREAM), [("engine", body)])
