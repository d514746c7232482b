"""Hostile connections against a server on this machine: what each gets, and what it costs the others.

    python -m tests.fuzz.connections [--tls] [--only WORD]... [-- FLAGS OF raycore serve]

Starts a server of the bundled model that asks for a key, keeps a neighbour streaming, and lets one attack after the
other run. A row has what the attacker sent and got, the longest time between two of the neighbour's events, the CPU
time and the resident memory of the server's process, and how many lines it logged. Each attack is bounded in bytes,
connections and seconds. Nothing leaves 127.0.0.1. The time between events depends on the machine: compare it with the
row `nobody`.
"""

from __future__ import annotations

import argparse
import gzip
import os
import re
import resource
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from common import table

KEY = "secret"
MOST_S = 20.0
"""Seconds after which an attack gives up."""
START = re.compile(rb"serving .* on https?://127\.0\.0\.1:(\d+)")


class Target:
    """Where the server listens."""

    def __init__(self, port: int, context: ssl.SSLContext | None = None) -> None:
        self.port, self.context = port, context

    def connect(self, *, is_plain: bool = False) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=MOST_S)
        return connection if self.context is None or is_plain else self.context.wrap_socket(connection)


def request(path: str, body: bytes | None = b"", *headers: str, method: str = "POST", key: bool = False) -> bytes:
    """The head of a request, and its body. None: the body's length isn't said."""
    lines = [f"{method} {path} HTTP/1.1", "Host: a", *headers, *([f"Authorization: Bearer {KEY}"] if key else [])]
    if body is not None and method == "POST":
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + (body or b"")


STREAM = request("/v1/completions", b'{"prompt": "1", "max_tokens": 900, "ignore_eos": true, "stream": true}', key=True)


def outcome(connection: socket.socket, seconds: float = 3.0) -> str:
    """What a connection gets: the statuses of the responses, and whether it ended."""
    connection.settimeout(seconds)
    got, end = b"", "stays open"
    try:
        while len(got) < 1 << 20:
            if not (part := connection.recv(1 << 16)):
                end = "closed"
                break
            got += part
    except TimeoutError:
        pass
    except OSError:
        end = "reset"
    statuses = Counter(re.findall(rb"HTTP/1\.1 (\d+)", got))
    shown = [status.decode() if number == 1 else f"{number} x {status.decode()}" for status, number in statuses.items()]
    return ", ".join([*shown, end])


def flood(target: Target, before: bytes, part: bytes, most: int) -> tuple[str, str]:
    """Send `part` again and again, up to so many bytes."""
    with target.connect() as connection:
        sent, deadline_s = 0, time.monotonic() + MOST_S
        with suppress(OSError):
            connection.sendall(before)
            while sent < most and time.monotonic() < deadline_s:
                connection.sendall(part)
                sent += len(part)
        return f"{sent / 1e6:.1f} MB", outcome(connection)


def dribble(target: Target, before: bytes, number: int) -> tuple[str, str]:
    """Send a byte a second on each of several connections."""
    connections = [target.connect() for _ in range(number)]
    ended: dict[int, float] = {}
    statuses: Counter[str] = Counter()
    started_s = time.monotonic()
    for each in connections:
        each.sendall(before)
    while time.monotonic() < started_s + MOST_S and len(ended) < number:
        for index, each in enumerate(connections):
            if index in ended:
                continue
            try:
                each.sendall(b"a")
                each.settimeout(0.01)
                if part := each.recv(1 << 16):
                    statuses |= {found.decode(): 1 for found in re.findall(rb"HTTP/1\.1 (\d+)", part)}
                else:
                    ended[index] = time.monotonic() - started_s
            except TimeoutError:
                pass
            except OSError:
                ended[index] = time.monotonic() - started_s
        time.sleep(1.0)
    for each in connections:
        each.close()
    after = f", the last after {max(ended.values()):.0f} s" if ended else ""
    return f"{number} connections", f"{', '.join(statuses) or 'nothing'}; {len(ended)} ended{after}"


def hold(target: Target, number: int, sent: bytes, *, is_plain: bool = False) -> tuple[str, str]:
    """Open connections, send the same on each, and leave them."""
    connections: list[socket.socket] = []
    with suppress(OSError):
        for _ in range(number):
            connections.append(target.connect(is_plain=is_plain))
            connections[-1].sendall(sent)
    time.sleep(MOST_S)
    found = Counter(outcome(each, 0.01) for each in connections)
    for each in connections:
        each.close()
    return f"{len(connections)} connections", "; ".join(f"{count}: {what}" for what, count in found.items())


def repeat(target: Target, number: int, sent: bytes) -> tuple[str, str]:
    """Send the same on many connections, one after the other."""
    found: Counter[str] = Counter()
    for _ in range(number):
        try:
            with target.connect() as connection:
                connection.sendall(sent)
                connection.shutdown(socket.SHUT_WR)
                found[outcome(connection, 1.0)] += 1
        except OSError as error:
            found[type(error).__name__] += 1
    return f"{number} connections", "; ".join(f"{count}: {what}" for what, count in found.most_common(2))


def unread(target: Target, number: int, sent: bytes) -> tuple[str, str]:
    """Ask, and read nothing."""
    connections = [target.connect() for _ in range(number)]
    for each in connections:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        each.settimeout(1.0)
        with suppress(OSError):
            each.sendall(sent)
    time.sleep(5.0)
    for each in connections:
        each.close()
    return f"{number} connections", "not read"


LENGTH, SHORT = "Content-Length: 1000000000", "Content-Length: 100000"
CHUNKED = "Transfer-Encoding: chunked"
ENDLESS = b"x" * (1 << 16)
COMPLETE = "/v1/completions"
BOMB = gzip.compress(b" " * (500 << 20))
Attack = Callable[[Target], tuple[str, str]]
ATTACKS: dict[str, Attack] = {
    "nobody": lambda target: (time.sleep(5.0), ("", ""))[1],
    "a header without end": lambda target: flood(target, b"GET / HTTP/1.1\r\nX: ", ENDLESS, 60_000_000),
    "a path without end": lambda target: flood(target, b"GET /", ENDLESS, 60_000_000),
    "headers without end": lambda target: flood(target, b"GET / HTTP/1.1\r\n", b"a: b\r\n" * 10_000, 20_000_000),
    "blank lines without end": lambda target: flood(target, b"", b"\r\n" * 30_000, 20_000_000),
    "garbage": lambda target: flood(target, b"", os.urandom(1 << 16), 20_000_000),
    "headers that dribble": lambda target: dribble(target, b"GET / HTTP/1.1\r\nX: ", 20),
    "silent connections": lambda target: hold(target, 500, b""),
    "a body that dribbles, no key": lambda target: dribble(target, request(COMPLETE, None, SHORT), 20),
    "a body that dribbles, with a key": lambda target: dribble(target, request(COMPLETE, None, SHORT, key=True), 20),
    "a body of 1 GB, no key": lambda target: flood(target, request(COMPLETE, None, LENGTH), ENDLESS, 200_000_000),
    "a body of 1 GB, with a key": lambda target: flood(
        target, request(COMPLETE, None, LENGTH, key=True), ENDLESS, 200_000_000
    ),
    "chunks of a byte, no key": lambda target: flood(
        target, request(COMPLETE, None, CHUNKED), b"1\r\na\r\n" * 10_000, 20_000_000
    ),
    "chunks of a byte, with a key": lambda target: flood(
        target, request(COMPLETE, None, CHUNKED, key=True), b"1\r\na\r\n" * 10_000, 20_000_000
    ),
    "an extension of a chunk without end": lambda target: flood(
        target, request(COMPLETE, None, CHUNKED, key=True) + b"1;a=", ENDLESS, 60_000_000
    ),
    "a trailer without end, no key": lambda target: flood(
        target, request(COMPLETE, None, CHUNKED) + b"1\r\na\r\n0\r\nX: ", ENDLESS, 60_000_000
    ),
    "a trailer without end, with a key": lambda target: flood(
        target, request(COMPLETE, None, CHUNKED, key=True) + b"1\r\na\r\n0\r\nX: ", ENDLESS, 60_000_000
    ),
    "a body that inflates to 500 MB": lambda target: flood(
        target, request(COMPLETE, BOMB, "Content-Encoding: gzip", key=True), b"", 0
    ),
    "100-continue without a body": lambda target: hold(
        target, 20, request(COMPLETE, None, SHORT, "Expect: 100-continue", key=True)
    ),
    "pipelined requests": lambda target: flood(
        target, b"", request("/health", method="GET", key=True) * 1_000, 10_000_000
    ),
    "requests pipelined behind a stream": lambda target: flood(
        target, STREAM, request("/health", method="GET", key=True) * 1_000, 10_000_000
    ),
    "responses that nobody reads": lambda target: unread(
        target, 20, request("/openapi.json", method="GET", key=True) * 200
    ),
    "streams that nobody reads": lambda target: unread(target, 20, STREAM),
    "2000 requests without a key": lambda target: repeat(target, 2_000, request(COMPLETE, b"{}", "Connection: close")),
    "2000 garbage connections": lambda target: repeat(target, 2_000, b"\x16\x03\x01garbage\r\n\r\n"),
    "2000 upgrades to WebSocket": lambda target: repeat(
        target,
        2_000,
        request(COMPLETE, None, "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: a", method="GET"),
    ),
    "HTTP/2": lambda target: repeat(target, 1, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "handshakes that never end": lambda target: hold(target, 500, b"", is_plain=True),
    "1500 connections": lambda target: hold(target, 1_500, b"GET /health HTTP/1.1\r\n"),
}


def neighbour(target: Target, pipe: Connection) -> None:
    """In a process of its own: stream all the time. Answers each message with the longest gap since the one before."""
    gap_s, num_streams, problems = 0.0, 0, Counter[str]()

    def stream() -> None:
        nonlocal gap_s, num_streams
        while True:
            try:
                with target.connect() as connection:
                    connection.settimeout(120.0)
                    connection.sendall(STREAM)
                    last_s, got = time.perf_counter(), b""
                    while b"[DONE]" not in got[-20_000:]:
                        if not (part := connection.recv(1 << 16)):
                            raise ConnectionError("a stream was cut short")
                        now_s = time.perf_counter()
                        gap_s, last_s, got = max(gap_s, now_s - last_s), now_s, got[-20_000:] + part
                    num_streams += 1
            except (OSError, ConnectionError) as error:
                problems[str(error)] += 1
                time.sleep(0.5)

    threading.Thread(target=stream, daemon=True).start()
    while pipe.recv():
        pipe.send((gap_s, num_streams, dict(problems)))
        gap_s, num_streams = 0.0, 0
        problems.clear()


class Server:
    """A server that is a child of this process."""

    def __init__(self, flags: Sequence[str]) -> None:
        self._log = tempfile.NamedTemporaryFile(suffix=".log")  # noqa: SIM115 - it lives as long as this object
        command = [sys.executable, "-m", "raycore", "serve", "--port", "0", "--api-key", KEY, *flags]
        self.process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        self.port = self._wait()

    def _wait(self) -> int:
        deadline_s = time.monotonic() + 120.0
        while time.monotonic() < deadline_s and self.process.poll() is None:
            if found := START.search(self.log()):
                return int(found[1])
            time.sleep(0.2)
        raise RuntimeError(f"the server didn't start:\n{self.log().decode(errors='replace')[-3000:]}")

    def log(self) -> bytes:
        return Path(self._log.name).read_bytes()

    def memory_mb(self) -> float:
        """Resident memory."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1e3

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60.0)
        except subprocess.TimeoutExpired:
            self.process.kill()


def run(target: Target, server: Server, wanted: Sequence[str]) -> list[list[object]]:
    """Run the attacks. Returns a row for each."""
    here, there = get_context("fork").Pipe()
    child = get_context("fork").Process(target=neighbour, args=(target, there), daemon=True)
    child.start()

    def ask() -> Any:
        here.send(True)
        return here.recv()

    rows: list[list[object]] = []
    try:
        for name, attack in ATTACKS.items():
            if wanted and not any(word in name for word in wanted):
                continue
            if name.startswith("handshakes") and target.context is None:
                continue
            ask()
            memory_mb, cpu_s, lines, started_s = server.memory_mb(), server.cpu_s(), len(server.log()), time.monotonic()
            most_mb, is_over = memory_mb, threading.Event()

            def watch(over: threading.Event = is_over) -> None:
                nonlocal most_mb
                while not over.wait(0.05):
                    with suppress(OSError):
                        most_mb = max(most_mb, server.memory_mb())

            watching = threading.Thread(target=watch, daemon=True)
            watching.start()
            try:
                sent, got = attack(target)
            except OSError as error:
                sent, got = "", f"{type(error).__name__}: {error}"
            is_over.set()
            watching.join()
            gap_s, streams, problems = ask()
            row = [name, sent, got, f"{time.monotonic() - started_s:.1f}", f"{gap_s * 1e3:.0f}", f"{streams}"]
            row[-1] += f" ({problems})" if problems else ""
            row += [f"{server.cpu_s() - cpu_s:.1f}", f"{memory_mb:.0f}", f"{most_mb:.0f}", f"{server.memory_mb():.0f}"]
            row += [server.log()[lines:].count(b"\n")]
            rows.append(row)
            print(*row, sep=" | ", flush=True)
    finally:
        child.terminate()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tls", action="store_true", help="the server speaks HTTPS")
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="attacks whose name has this word")
    parser.add_argument("flags", nargs="*", help="flags of `raycore serve`, after --")
    args = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 8192), most))
    with tempfile.TemporaryDirectory() as directory:
        flags, context = args.flags, None
        if args.tls:
            certificate = Path(directory, "a.pem")
            command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
            command += ["-subj", "/CN=a", "-days", "1", "-keyout", str(certificate), "-out", f"{certificate}.crt"]
            subprocess.run(command, check=True, capture_output=True)
            flags = [*flags, "--ssl-certfile", f"{certificate}.crt", "--ssl-keyfile", str(certificate)]
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        server = Server(flags)
        try:
            rows = run(Target(server.port, context), server, args.only)
        finally:
            server.end()
    head = [
        "attack",
        "sent",
        "got",
        "s",
        "longest gap in ms",
        "streams",
        "CPU s",
        "MB before",
        "at most",
        "after",
        "lines",
    ]
    print(table([head, *rows]))
    print(f"the server ended with status {server.process.returncode}")


if __name__ == "__main__":
    main()
