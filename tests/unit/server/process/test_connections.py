"""What hostile clients of a server get, over real sockets, while another client streams. Times are those of a fake
loop."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import ssl
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import uvicorn
from certificates import Authority
from fake_engine import FakeEngine
from uvicorn.server import ServerState

from raycore.server import ServerOptions, build_app
from raycore.server.listen_options import ListenOptions
from raycore.server.process import serving
from raycore.server.process.connections import HttpConnection, connection_class
from raycore.server.process.listening import listening
from raycore.server.process.serving import HttpServer

MOST_S = 60.0
"""Longer than anything takes, on any machine."""
BODY = b'{"prompt": "27 + 58 ="}'
STREAM = b'{"prompt": "27 + 58 =", "stream": true}'
PATH = "/v1/completions"


def head(*headers: str, method: str = "POST", path: str = PATH, version: str = "1.1") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/{version}", *headers, "", ""]).encode()


def whole(body: bytes = BODY, *headers: str, version: str = "1.1") -> bytes:
    return head(*headers, f"Content-Length: {len(body)}", version=version) + body


class Served:
    """A server, and a neighbour that streams from it until `finish()`."""

    def __init__(self, address: tuple[str, int], context: ssl.SSLContext | None, gate: threading.Event) -> None:
        self._address, self._context, self._gate = address, context, gate
        self._neighbour = self.connect()
        self._neighbour.sendall(whole(STREAM, "Connection: close"))
        self._begun = self._neighbour.recv(1 << 16)
        assert self._begun.startswith(b"HTTP/1.1 200")

    def connect(self) -> socket.socket:
        connection = socket.create_connection(self._address, timeout=MOST_S)
        return (
            connection if self._context is None else self._context.wrap_socket(connection, server_hostname="127.0.0.1")
        )

    def send(self, *parts: bytes) -> bytes:
        """What a client gets until its connection ends, which sends this and stops when it can't."""
        with self.connect() as connection:
            with suppress(OSError):
                for part in parts:
                    connection.sendall(part)
            return received(connection)

    def finish(self) -> None:
        """The neighbour's stream is whole."""
        self._gate.set()
        got = self._begun + received(self._neighbour)
        assert got.count(b"data: ") > 3
        assert b"data: [DONE]" in got
        self._neighbour.close()


def received(connection: socket.socket) -> bytes:
    got = b""
    with suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            got += part
    return got


def statuses(got: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+)", got)]


def error_of(got: bytes) -> tuple[int, str | None]:
    status, _, body = got.partition(b"\r\n\r\n")
    assert b"connection: close" in status.lower()
    return int(status.split()[1]), json.loads(body)["error"]["code"]


@contextmanager
def server(count: int = 1, context: ssl.SSLContext | None = None, **options: Any) -> Generator[Served, None, None]:
    """Serve. With `count`, so many servers share a port."""
    gate, is_at_gate, engine = threading.Event(), threading.Event(), FakeEngine()

    def at_token(index: int) -> Any:
        if index != 2 or is_at_gate.is_set():  # only the neighbour, which comes first, waits
            return None
        is_at_gate.set()
        return asyncio.to_thread(gate.wait, MOST_S)

    engine.at_token = at_token
    chosen = ListenOptions(port=0, **options)
    with ExitStack() as stack:
        listener = stack.enter_context(listening(chosen, is_shared=False))
        for _ in range(count):
            each = HttpServer(build_app(engine, ServerOptions(("fake",), api_keys=())), listener.dup(), chosen)
            each.start()
            stack.callback(each.stop)
        stack.callback(gate.set)
        served = Served(listener.getsockname()[:2], context, gate)
        assert is_at_gate.wait(MOST_S)
        yield served


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], ssl.SSLContext]:
    authority = Authority(tmp_path_factory.mktemp("certificates"))
    certificate, key = authority.sign("server")
    context = ssl.create_default_context(cafile=str(authority.file))
    return {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}, context


LONG = [b"x" * (1 << 16)] * 64
CHUNKED = "Transfer-Encoding: chunked"
HOSTILE: dict[str, tuple[list[bytes], int, str | None]] = {
    "a header without end": ([b"GET / HTTP/1.1\r\nX: ", *LONG], 431, "headers_too_large"),
    "a path without end": ([b"GET /", *LONG], 431, "headers_too_large"),
    "a long header that ends": ([head("X: " + "x" * (1 << 16), method="GET")], 431, "headers_too_large"),
    "headers without end": ([b"GET / HTTP/1.1\r\n", *[b"a: b\r\n" * 10_000] * 64], 431, "headers_too_large"),
    "many headers": ([head(*["a: b"] * 257, method="GET")], 431, "too_many_headers"),
    "blank lines": ([b"\r\n" * 30_000] * 64, 431, "headers_too_large"),
    "garbage": ([b"\x16\x03\x01 garbage \r\n\r\n", *LONG], 400, None),
    "the preface of HTTP/2": ([b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"], 400, None),
    "a tunnel": ([head("Host: a", method="CONNECT", path="a:443")], 400, None),
    "an extension of a chunk": ([head(CHUNKED), b"1;a=", *LONG], 431, "headers_too_large"),
    "a trailer": ([head(CHUNKED), b"1\r\na\r\n0\r\nX: ", *LONG], 431, "headers_too_large"),
    "trailers": ([head(CHUNKED), b"1\r\na\r\n0\r\n", *[b"a: b\r\n" * 10_000] * 64], 431, "headers_too_large"),
    "chunks of a byte": ([head(CHUNKED), *[b"1\r\na\r\n" * 10_000] * 64], 431, "headers_too_large"),
}


@pytest.fixture(scope="module", params=["plain", "tls", "two servers"])
def served(request: pytest.FixtureRequest, secure: Any) -> Generator[Served, None, None]:
    options, context = secure if request.param == "tls" else ({}, None)
    with server(2 if request.param == "two servers" else 1, context, **options) as served:
        yield served
        served.finish()


@pytest.mark.parametrize("name", HOSTILE)
def test_what_has_no_end_is_refused_while_others_stream(served: Served, name: str) -> None:
    sent, status, code = HOSTILE[name]
    assert error_of(served.send(*sent)) == (status, code)


def test_requests_of_ordinary_size_are_served(served: Served) -> None:
    with served.connect() as connection:
        for each in (
            whole(BODY, "X: " + "x" * 60_000),
            whole(BODY, *["a: b"] * 200),
            whole(BODY + b" " * 300_000),
            b"\r\n" + head(CHUNKED) + b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\nA: b\r\n\r\n",
        ):
            connection.sendall(each)
            got = b""
            while b'"text":" 85' not in got:
                part = connection.recv(1 << 16)
                assert part, got
                got += part
        connection.sendall(whole(BODY, "Connection: close"))
        assert statuses(received(connection)) == [200]


def test_pipelined_requests_are_answered_up_to_a_limit(served: Served) -> None:
    got = served.send(head(method="GET", path="/version") * 5 + head("Connection: close", method="GET", path="/health"))
    assert statuses(got) == [200] * 6
    got = served.send(*[head(method="GET", path="/version") * 1_000] * 20)
    assert set(statuses(got)) == {200}
    assert len(statuses(got)) < 1_000


def test_what_follows_a_request_cannot_disturb_its_response(served: Served) -> None:
    with served.connect() as connection:
        connection.sendall(whole(STREAM) + b"garbage\r\n\r\n")
        got = received(connection)
    assert statuses(got) == [200]
    assert got.endswith(b"0\r\n\r\n")


def test_an_error_follows_the_responses_to_the_requests_before_it(served: Served) -> None:
    got = served.send(head(method="GET", path="/version") * 3 + head(CHUNKED) + b"garbage\r\n")
    assert statuses(got) == [200, 200, 200, 400]
    assert b"this isn't a request of HTTP/1.1" in got.rpartition(b"\r\n\r\n")[2]


def test_trailers_are_no_headers(served: Served) -> None:
    body = b"%x\r\n%b\r\n0\r\n" % (len(BODY), BODY)
    got = served.send(head(CHUNKED, "Connection: close") + body + b"X-Request-Id: late\r\nContent-Encoding: br\r\n\r\n")
    assert statuses(got) == [200]
    assert b"late" not in got


@pytest.mark.parametrize(
    "offer", [["Upgrade: websocket", "Sec-WebSocket-Key: a"], ["Upgrade: h2c", "HTTP2-Settings: a"]]
)
@pytest.mark.parametrize("how", ["length", "chunks", "in parts"])
def test_an_offer_of_another_protocol_is_ignored(served: Served, offer: list[str], how: str) -> None:
    headers = ["Connection: Upgrade", *offer]
    if how == "chunks":
        parts = [
            head(CHUNKED, *headers),
            b"5\r\n" + BODY[:5] + b"\r\n",
            b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY) - 5, BODY[5:]),
        ]
    else:
        request = whole(BODY, *headers)
        parts = [request[:-5], request[-5:]] if how == "in parts" else [request]
    got = served.send(*parts)
    assert statuses(got) == [200]
    assert b" 85 is the answer" in got


def test_what_follows_an_offer_of_another_protocol_is_not_its_body(served: Served) -> None:
    offer = whole(BODY, "Connection: Upgrade", "Upgrade: h2c")
    got = served.send(offer + whole(b"more"))
    assert statuses(got) == [200]
    assert b" 85 is the answer" in got


def test_a_stream_to_a_client_of_http_1_0_ends_with_its_connection(served: Served) -> None:
    got = served.send(whole(STREAM, version="1.0"))
    headers, _, body = got.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in headers
    assert b"connection: close" in headers
    assert body.startswith(b"data: {")
    assert body.endswith(b"}\n\ndata: [DONE]\n\n")
    plain = served.send(whole(BODY, version="1.0"))
    assert b"content-length" in plain
    assert b" 85 is the answer" in plain


def test_connections_above_the_limit_are_told_so_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with server(max_connections=3) as served:
        with served.connect() as second, served.connect() as third:
            for each in (second, third):
                each.sendall(head(method="GET", path="/health"))
                assert each.recv(100).startswith(b"HTTP/1.1 200")
            with caplog.at_level("WARNING"):
                for _ in range(3):
                    assert error_of(served.send()) == (503, "too_many_connections")
            assert caplog.messages == ["3 connections are open, and further ones are refused (max_connections)"]
        served.finish()


def test_a_handshake_that_never_ends_ends(secure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_HANDSHAKE_S", 0.1)
    options = ListenOptions(port=0, **secure[0])
    with listening(options, is_shared=False) as listener:
        server = HttpServer(build_app(FakeEngine(), ServerOptions(("fake",))), listener, options)
        server.start()
        try:
            with socket.create_connection(listener.getsockname()[:2], timeout=MOST_S / 2) as connection:
                assert received(connection) == b""
        finally:
            server.stop()


# ---- times


class Loop:
    """An event loop whose time passes when it is told to. It runs no requests."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._calls: list[tuple[float, mock.Mock, Callable[[], Any]]] = []

    def call_later(self, delay_s: float, call: Callable[..., Any], *args: Any) -> mock.Mock:
        handle = mock.Mock()
        self._calls.append((self.now_s + delay_s, handle, lambda: call(*args)))
        return handle

    def create_task(self, coroutine: Any, **_: Any) -> mock.Mock:
        coroutine.close()
        return mock.Mock()

    def run_for(self, seconds: float) -> None:
        self.now_s += seconds
        due = [each for each in self._calls if each[0] <= self.now_s]
        self._calls = [each for each in self._calls if each[0] > self.now_s]
        for _, handle, call in due:
            if not handle.cancel.called:
                call()


class Transport(mock.Mock):
    """A connection's other side. `written` is what the client would read."""

    written = b""
    num_waiting = 0
    is_ended = False

    def write(self, data: bytes) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return self.num_waiting

    def close(self) -> None:
        self.is_ended = True

    abort = close

    def is_closing(self) -> bool:
        return self.is_ended


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def connection(loop: Loop) -> HttpConnection:
    kind = connection_class(ListenOptions(header_timeout_s=30.0), max_connections=2)
    config = uvicorn.Config(mock.Mock(), interface="asgi3", ws="none", timeout_keep_alive=5)
    config.load()
    made = kind(config, ServerState(), {}, _loop=loop)
    made.connection_made(Transport(get_extra_info=lambda name: None))
    return made


@pytest.fixture
def client(connection: HttpConnection) -> Any:
    return connection.transport


def answered(connection: HttpConnection) -> None:
    connection.cycle.response_complete = True
    connection.on_response_complete()


def test_a_connection_that_sends_nothing_ends(loop: Loop, client: Any) -> None:
    loop.run_for(29.0)
    assert not client.is_ended
    loop.run_for(2.0)
    assert (client.is_ended, client.written) == (True, b"")


def test_headers_that_dribble_have_one_deadline(loop: Loop, connection: HttpConnection, client: Any) -> None:
    connection.data_received(b"GET / HTTP/1.1\r\nX: ")
    for _ in range(29):
        connection.data_received(b"x")
        loop.run_for(1.0)
    assert client.written == b""
    loop.run_for(2.0)
    assert error_of(client.written) == (408, "request_timeout")
    assert not client.is_ended  # the client may still read
    loop.run_for(1.0)
    assert client.is_ended


@pytest.mark.parametrize("dribble", [b"\r\n", b"GET / HTTP/1.1\r\nX: "])
def test_the_next_request_has_a_deadline_too(
    loop: Loop, connection: HttpConnection, client: Any, dribble: bytes
) -> None:
    connection.data_received(head(method="GET"))
    loop.run_for(1_000.0)  # a response may take as long as it likes
    assert not client.is_ended
    answered(connection)
    loop.run_for(4.0)
    connection.data_received(dribble)
    loop.run_for(29.0)
    assert not client.is_ended
    loop.run_for(3.0)
    assert b"HTTP/1.1 408" in client.written


def test_an_idle_connection_ends_earlier(loop: Loop, connection: HttpConnection, client: Any) -> None:
    connection.data_received(head(method="GET"))
    answered(connection)
    loop.run_for(6.0)
    assert (client.is_ended, client.written) == (True, b"")


def test_a_server_that_ends_answers_the_request_that_is_under_way(
    loop: Loop, connection: HttpConnection, client: Any
) -> None:
    connection.shutdown()
    connection.data_received(head(method="GET"))
    loop.run_for(1.0)
    assert (client.is_ended, connection.cycle.keep_alive) == (False, False)


def test_a_server_that_ends_waits_no_longer_for_a_silent_connection(
    loop: Loop, connection: HttpConnection, client: Any
) -> None:
    connection.shutdown()
    assert not client.is_ended
    loop.run_for(1.0)
    assert client.is_ended


def test_the_rest_of_a_refused_body_has_the_deadline(loop: Loop, connection: HttpConnection, client: Any) -> None:
    connection.data_received(head("Content-Length: 1000000"))
    answered(connection)
    for _ in range(29):
        connection.data_received(b"x")
        loop.run_for(1.0)
    assert not client.is_ended
    loop.run_for(2.0)
    assert (client.is_ended, client.written) == (True, b"")


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_client_that_reads_nothing_is_gone(
    loop: Loop, connection: HttpConnection, client: Any, is_whole: bool
) -> None:
    connection.data_received(head(method="GET"))
    client.num_waiting = 100_000
    if is_whole:  # its buffer isn't large enough to stop the response, which was the last
        client.is_ended = True
        answered(connection)
        client.is_ended = False
    else:
        connection.pause_writing()
    for _ in range(10):  # slowly
        client.num_waiting -= 1
        loop.run_for(60.0)
    assert not client.is_ended
    loop.run_for(60.0)
    assert client.is_ended


def test_a_client_that_reads_is_not_gone(loop: Loop, connection: HttpConnection, client: Any) -> None:
    connection.data_received(head(method="GET"))
    client.num_waiting = 100_000
    connection.pause_writing()
    client.num_waiting = 0
    connection.resume_writing()
    loop.run_for(1_000.0)
    assert not client.is_ended


def test_an_unfinished_body_ends_with_its_connection(connection: HttpConnection, client: Any) -> None:
    connection.data_received(head(CHUNKED) + b"1\r\na\r\n0\r\n" + b"a: b\r\n" * 20_000)
    assert error_of(client.written) == (431, "headers_too_large")
    assert connection.cycle.disconnected
    assert SimpleNamespace(**vars(connection.flow)).read_paused
