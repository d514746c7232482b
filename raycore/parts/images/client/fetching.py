"""Fetches images over HTTP from allowed hosts.

A URL comes from whoever sends a request, so nothing about it is trusted. Its host must be one of the allowed ones, and
all addresses of that host must be public. The connection is made to an address that was checked, so no second look-up
can give another one. Redirects are followed a few times, and checked like the first URL. Proxies of the environment are
not used. One deadline holds for everything.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Collection
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import NamedTuple
from urllib.parse import urljoin, urlsplit

from raycore.errors import InvalidRequest
from raycore.parts.images.client.addresses import is_public, resolve
from raycore.system import Timer, os, socket, time

MAX_REDIRECTS = 3
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_CHUNK_BYTES = 1 << 16
_MAX_URL_CHARACTERS = 8192
_HEADERS = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "raycore", "Connection": "close"}


class _Target(NamedTuple):
    """What a URL names."""

    is_encrypted: bool
    host: str
    port: int
    path: str


class Fetcher:
    """Fetches images from allowed hosts. Thread-safe.

    `resolve`, `is_public` and `tls` are replaced in tests.
    """

    def __init__(
        self,
        allowed_hosts: Collection[str],
        max_bytes: int,
        timeout_s: float,
        *,
        resolve: Callable[[str, int, float], list[str]] = resolve,
        is_public: Callable[[str], bool] = is_public,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._allowed_hosts = frozenset(allowed_hosts)
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._resolve = resolve
        self._is_public = is_public
        self._tls = tls

    def fetch(self, url: str) -> bytes:
        """Return what a URL names.

        Raises:
            InvalidRequest: it isn't allowed, can't be fetched in time, or is too large.
        """
        deadline_s = time.monotonic() + self._timeout_s
        for _ in range(MAX_REDIRECTS + 1):
            target = self._target(url)
            address = self._address(target, deadline_s)
            answer = self._ask(target, address, deadline_s)
            if isinstance(answer, bytes):
                return answer
            url = urljoin(url, answer)
        raise InvalidRequest(f"the URL is redirected more than {MAX_REDIRECTS} times")

    def _target(self, url: str) -> _Target:
        """Check a URL without asking anybody."""
        if not self._allowed_hosts:
            raise InvalidRequest(
                "this server fetches no images: send a data URL, or start it with allowed_media_domains"
            )
        if len(url) > _MAX_URL_CHARACTERS:
            raise InvalidRequest(f"the URL has more than {_MAX_URL_CHARACTERS} characters")
        if not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
            raise InvalidRequest("the URL has characters that have to be escaped")
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise InvalidRequest(f"the URL is invalid: {error}") from None
        if parts.scheme not in ("http", "https"):
            raise InvalidRequest(f"the URL has the scheme {parts.scheme!r}: only http, https, data and file are known")
        if "@" in parts.netloc:
            raise InvalidRequest("the URL has a user name or a password")
        if not host or host not in self._allowed_hosts:
            raise InvalidRequest("the URL's host isn't one of allowed_media_domains")
        is_encrypted = parts.scheme == "https"
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return _Target(is_encrypted, host, (443 if is_encrypted else 80) if port is None else port, path)

    def _address(self, target: _Target, deadline_s: float) -> str:
        addresses = self._resolve(target.host, target.port, deadline_s - time.monotonic())
        # one private address is enough to refuse: which of several is used would be chance
        if not addresses or not all(map(self._is_public, addresses)):
            raise InvalidRequest(f"the host {target.host} has an address that isn't public")
        return addresses[0]

    def _ask(self, target: _Target, address: str, deadline_s: float) -> bytes | str:
        """Ask the server at an address. Returns what it sends, or where it redirects to."""
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise self._too_late(target)
        connection: HTTPConnection | None = None
        handle: socket.socket | None = None
        timer: Timer | None = None
        try:
            raw = socket.create_connection((address, target.port), timeout=left_s)
            # A server that sends a byte now and then never runs into the timeout of a read. Another handle of the
            # same connection ends it at the deadline.
            handle = socket.socket(fileno=os.dup(raw.fileno()))
            timer = Timer(max(0.0, deadline_s - time.monotonic()), _end, (handle,))
            timer.daemon = True
            timer.start()
            connection = HTTPConnection(target.host, target.port)
            connection.sock = self._encrypted(raw, target.host) if target.is_encrypted else raw
            connection.request("GET", target.path, headers=_HEADERS)
            return self._read(connection.getresponse())
        except (OSError, HTTPException, ValueError, AttributeError) as error:
            if time.monotonic() >= deadline_s:
                raise self._too_late(target) from None
            raise InvalidRequest(f"the host {target.host} can't be asked: {type(error).__name__}") from None
        finally:
            if timer is not None:
                timer.cancel()
            if connection is not None:
                connection.close()
            if handle is not None:
                handle.close()

    def _encrypted(self, raw: socket.socket, host: str) -> socket.socket:
        try:
            return (self._tls or ssl.create_default_context()).wrap_socket(raw, server_hostname=host)
        except BaseException:
            raw.close()
            raise

    def _read(self, response: HTTPResponse) -> bytes | str:
        location = response.getheader("Location")
        if response.status in _REDIRECTS and location:
            return location
        if response.status != 200:
            raise InvalidRequest(f"the URL's host answers with status {response.status}")
        encoding = response.getheader("Content-Encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            raise InvalidRequest(f"the URL's content is encoded as {encoding!r}, which wasn't asked for")
        length = response.length
        if length is not None and length > self._max_bytes:
            raise self._too_large()
        data = bytearray()
        while part := response.read(_CHUNK_BYTES):
            data += part
            if len(data) > self._max_bytes:
                raise self._too_large()
        if length is not None and len(data) < length:
            raise OSError("the answer is incomplete")
        return bytes(data)

    def _too_late(self, target: _Target) -> InvalidRequest:
        return InvalidRequest(f"the host {target.host} didn't send the image within {self._timeout_s:g} s")

    def _too_large(self) -> InvalidRequest:
        return InvalidRequest(f"the URL's content has more than max_image_bytes={self._max_bytes} bytes")


def _end(handle: socket.socket) -> None:
    with suppress(OSError):
        handle.shutdown(socket.SHUT_RDWR)
