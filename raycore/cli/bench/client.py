"""Sends a benchmark's requests, and notes when each part of an answer arrives."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from raycore.cli.bench.samples import Sample


@dataclass
class RequestResult:
    """One request, as its client sees it. Times are in seconds."""

    prompt_len: int
    is_success: bool = False
    start_time: float = 0.0
    """When it was sent, on a clock that has no meaning of its own."""
    ttft: float = 0.0
    """Until the first part of the answer."""
    itl: list[float] = field(default_factory=list[float])
    """Between each part and the next."""
    latency: float = 0.0
    """Until the last part."""
    output_tokens: int = 0
    """The server's count. 0: it gave none."""
    text: str = ""
    error: str = ""
    queue_time: float = 0.0
    """How long the request waited for others, because of a limit on concurrency."""


@dataclass(frozen=True)
class Target:
    """What requests are sent to, and with which fields."""

    url: str
    kind: str
    """completions, chat or embeddings."""
    headers: dict[str, str]
    body: dict[str, Any]
    """Fields that all requests have."""

    def body_of(self, sample: Sample, model: str) -> dict[str, Any]:
        """The body of the request for a sample."""
        if self.kind == "embeddings":
            return {"model": model, "input": sample.prompt, **self.body}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        if self.kind == "chat":
            messages = [{"role": "user", "content": sample.prompt}]
            return {
                "model": model,
                "messages": messages,
                "max_completion_tokens": sample.output_len,
                **stream,
                **self.body,
            }
        return {"model": model, "prompt": sample.prompt, "max_tokens": sample.output_len, **stream, **self.body}


async def send(
    session: aiohttp.ClientSession, target: Target, sample: Sample, model: str, request_id: str | None = None
) -> RequestResult:
    """Send one request and read its answer. An error is in the result."""
    headers = target.headers if request_id is None else target.headers | {"X-Request-Id": request_id}
    result = RequestResult(sample.prompt_len)
    body = target.body_of(sample, model)
    result.start_time = time.perf_counter()
    try:
        async with session.post(target.url, json=body, headers=headers) as response:
            if response.status != 200:
                result.error = f"status {response.status}: {(await response.text())[:500]}"
            elif target.kind == "embeddings":
                answer = json.loads(await response.read())
                result.latency = time.perf_counter() - result.start_time
                result.prompt_len = answer["usage"]["prompt_tokens"]
                result.is_success = True
            else:
                await _read(response, result)
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
        result.error = f"{type(error).__name__}: {error}"
    return result


async def _read(response: aiohttp.ClientResponse, result: RequestResult) -> None:
    last: float | None = None
    is_whole = False
    parts: list[str] = []
    async for data in _events(response):
        if data == b"[DONE]":
            is_whole = True
            continue
        event = json.loads(data)
        if "error" in event:
            result.error = str(event["error"])[:500]
            return
        for choice in event["choices"][:1]:
            now = time.perf_counter()
            if last is None:
                result.ttft = now - result.start_time
            else:
                result.itl.append(now - last)
            last = now
            parts.append(_text(choice))
        if not event["choices"] and event.get("usage"):
            result.output_tokens = event["usage"]["completion_tokens"]
            result.prompt_len = event["usage"]["prompt_tokens"]
    result.text = "".join(parts)
    if last is None or not is_whole:
        result.error = "the answer had no token" if last is None else "the answer ended before it was complete"
        return
    result.latency = last - result.start_time
    result.is_success = True


def _text(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return choice["text"] or ""
    delta = choice["delta"]
    return (delta.get("reasoning") or "") + (delta.get("content") or "")


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The data of each server-sent event, as soon as it has arrived."""
    rest = b""
    async for part in response.content.iter_any():
        *whole, rest = (rest + part).split(b"\n\n")
        for event in whole:
            if event.startswith(b"data:"):  # others are comments
                yield event.removeprefix(b"data:").strip()
