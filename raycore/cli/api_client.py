"""A client of a running server with OpenAI's API, of the standard library alone."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator
from typing import Any
from urllib.parse import urlsplit

from raycore.errors import InvalidConfig, RaycoreError

_TIMEOUT_S = 600.0
"""How long nothing may arrive."""


class ServerRefused(RaycoreError):
    """The server can't be reached, or answered with an error. The message says which."""


class ApiClient:
    """Calls a server. `url` is that of its API, such as http://localhost:8000/v1."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """Without `api_key`, the variable OPENAI_API_KEY or RAYCORE_API_KEY is read. Raises InvalidConfig for a URL
        that isn't one."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise InvalidConfig(f"--url {url}: give the URL of a server's API, such as http://localhost:8000/v1")
        self._url = url.rstrip("/")
        self._key = api_key or os.environ.get("OPENAI_API_KEY") or os.environ.get("RAYCORE_API_KEY")

    def first_model(self) -> str:
        """The name of the first model that the server lists. Raises ServerRefused."""
        with self._open("/models") as response:
            models = json.loads(response.read())["data"]
        if not models:
            raise ServerRefused(f"{self._url} serves no model")
        return models[0]["id"]

    def stream(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Yield the events of a streamed answer. Closing the iterator closes the connection.

        Raises:
            ServerRefused: the server can't be reached, answered with an error, or ended before the answer had.
        """
        with self._open(path, body | {"stream": True}) as response:
            for line in self._lines(response):
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise ServerRefused(_told(event) or data.decode())
                yield event
        raise ServerRefused(f"{self._url}{path}: the answer ended before it was complete")

    def _lines(self, response: Any) -> Iterator[bytes]:
        try:
            yield from response
        except (OSError, http.client.HTTPException) as error:
            raise ServerRefused(f"{self._url}: the connection was lost: {error}") from error

    def _open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers)
        try:
            return urllib.request.urlopen(request, timeout=_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            told = _told(_as_json(text)) or text[:500]
            raise ServerRefused(f"{self._url}{path}: status {error.code}: {told}") from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise ServerRefused(
                f"{self._url} can't be reached ({reason}): `raycore serve` starts a server, --url names another one"
            ) from error


def _as_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _told(answer: Any) -> str | None:
    """The message of an error in OpenAI's form; None if the answer isn't one."""
    try:
        return str(answer["error"]["message"])
    except (TypeError, LookupError):
        return None
