"""What a server answers before it has an engine."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine

from raycore.cluster.engine_start import EngineStart
from raycore.server import ServerOptions, build_app
from raycore.server.http_options import HttpOptions
from raycore.server.listen_options import ListenOptions
from raycore.server.process.listening import listen, listening
from raycore.server.process.loading import LoadingServer, answering_while_loading
from raycore.server.process.serving import HttpServer

ANYWHERE = ListenOptions(port=0)
DEFAULTS = HttpOptions()
TIMEOUT_S = 20.0


def start_in(now_s: list[float]) -> EngineStart:
    """A start of two ranks, of which one serves, that loads weights."""
    start = EngineStart(clock_s=lambda: now_s[0])
    manager: Any = SimpleNamespace(node="a", ranks={0: object(), 1: object()}, infos=[object()])
    start.watch(manager, 2, None)(0.5)
    return start


@contextmanager
def loading(
    options: ListenOptions = ANYWHERE, *, is_shared: bool = False, http: HttpOptions = DEFAULTS
) -> Generator[tuple[LoadingServer, socket.socket, httpx.Client], None, None]:
    """A server that loads: what answers, the server's socket, and a client."""
    now_s = [0.0]
    start = start_in(now_s)
    with ExitStack() as stack:
        listener = stack.enter_context(listening(options, is_shared=is_shared))
        answering = answering_while_loading(start, listener, options, is_shared=is_shared, http=http)
        loading = stack.enter_context(answering)
        now_s[0] = 12.0
        transport = httpx.HTTPTransport(uds=options.uds)
        url = "http://localhost" if options.uds else f"http://127.0.0.1:{listener.getsockname()[1]}"
        client = stack.enter_context(httpx.Client(base_url=url, transport=transport, timeout=TIMEOUT_S))
        yield loading, listener, client


@contextmanager
def serving(listener: socket.socket) -> Generator[None, None, None]:
    server = HttpServer(build_app(FakeEngine(), ServerOptions(("fake",))), listener)
    server.start()
    try:
        yield
    finally:
        server.stop()


TOLD = (
    "this server can't answer yet, because its model is loading: loading weights (50%), 1 of 2 ranks ready, 12 s so far"
)


def test_every_request_is_told_how_far_the_load_is():
    with loading() as (_, _, client):
        for method, path in (("GET", "/health"), ("POST", "/v1/completions"), ("GET", "/metrics"), ("PUT", "/any")):
            answer = client.request(method, path, headers={"x-request-id": "mine"})
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "12"
            assert answer.headers["connection"] == "close"
            assert answer.headers["x-request-id"] == "mine"
            error = {"message": TOLD, "type": "service_unavailable_error", "param": None, "code": "model_loading"}
            assert answer.json()["error"] == error
            assert answer.json()["loading"]["phase"] == "loading weights"
            assert answer.json()["loading"]["weights_read"] == 0.5
        assert client.head("/health").status_code == 503
        assert client.head("/health").content == b""


@pytest.mark.parametrize("root_path", ["", "/llm"])
def test_clients_of_anthropics_api_are_told_in_their_form(root_path):
    with loading(http=HttpOptions(root_path=root_path)) as (_, _, client):
        told = client.post(f"{root_path}/v1/messages", json={}).json()
    assert (told["type"], told["error"]) == ("error", {"type": "overloaded_error", "message": TOLD})
    assert told["request_id"]


def test_a_large_request_is_answered_whole(monkeypatch):
    monkeypatch.setattr("raycore.server.process.loading._BODY_S", TIMEOUT_S)
    with loading() as (_, listener, _):
        for _ in range(5):
            connection = http.client.HTTPConnection(*listener.getsockname(), timeout=TIMEOUT_S)
            connection.request("POST", "/v1/completions", bytes(4 << 20))
            assert connection.getresponse().status == 503
            connection.close()


@pytest.mark.parametrize("method", ["GET", "OPTIONS"])
def test_web_pages_can_read_the_answer(method):
    page = {"origin": "https://page.example", "access-control-request-method": "POST"}
    with loading() as (_, _, client):
        answer = client.request(method, "/v1/completions", headers=page)
    assert answer.status_code == (503 if method == "GET" else 200)
    assert answer.headers["access-control-allow-origin"] == "*"


def test_a_client_that_comes_between_the_two_servers_is_answered_by_the_second():
    with loading() as (first, listener, client):
        assert client.get("/health").status_code == 503
        first.stop()
        waiting = http.client.HTTPConnection(*listener.getsockname(), timeout=TIMEOUT_S)
        waiting.request("GET", "/health")
        with serving(listener):
            assert waiting.getresponse().status == 200
            waiting.close()
            assert client.get("/health").status_code == 200


def test_servers_that_share_a_port_take_over_one_after_the_other():
    with loading(is_shared=True) as (first, listener, client):
        assert client.get("/health").status_code == 503
        with serving(listen(*listener.getsockname(), is_shared=True)):
            assert {client.get("/health").status_code for _ in range(20)} <= {200, 503}
            first.stop()
            assert {client.get("/health").status_code for _ in range(20)} == {200}


def test_a_unix_socket_is_answered_too(tmp_path: Path):
    options = ListenOptions(uds=str(tmp_path / "server"))
    with loading(options, is_shared=True) as (first, listener, client):
        assert client.get("/health").json()["error"]["message"] == TOLD
        first.stop()
        with serving(listener):
            assert client.get("/health").status_code == 200


def test_nothing_listens_any_more_when_the_load_has_failed():
    class FailedError(Exception):
        pass

    addresses: list[Any] = []
    try:
        with loading() as (_, listener, client):
            assert client.get("/health").status_code == 503
            addresses.append(listener.getsockname())
            raise FailedError
    except FailedError:
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(addresses[0], timeout=TIMEOUT_S)


def test_the_line_that_an_application_has_started_is_not_written_while_loading(capsys):
    options = ListenOptions(port=0, uvicorn_log_level="info")
    with loading(options) as (first, listener, client):
        assert client.get("/health").status_code == 503
        first.stop()
        assert capsys.readouterr().err == ""
        server = HttpServer(build_app(FakeEngine(), ServerOptions(("fake",))), listener, options)
        server.start()
        server.stop()
    assert "Application startup complete" in capsys.readouterr().err
