"""A proxy before engines that compute prompts and engines that generate what follows.

    openssl rand -hex 32 > secret
    raycore serve MODEL --port 8100 --kv-transfer-config '{"kv_connector": "DisaggregationConnector",
        "kv_role": "kv_producer", "kv_connector_extra_config": {"secret_file": "secret"}}'
    raycore serve MODEL --port 8200 --kv-transfer-config '{"kv_connector": "DisaggregationConnector",
        "kv_role": "kv_consumer", "kv_connector_extra_config": {"secret_file": "secret"}}'
    python prefill_decode_proxy.py --port 8000 --prefill http://localhost:8100 --decode http://localhost:8200

A prefilling engine computes the prompt of a completion or a chat, and answers with one token and with where its blocks
are. A decoding engine reads them, and answers the client. If the first one is gone or refuses, the second one computes
the prompt itself. All other requests go to a decoding engine as they are.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from aiohttp import ClientConnectorError, ClientError, ClientSession, ClientTimeout, web

DIVIDED = ("/v1/completions", "/v1/chat/completions")
FORWARDED = ("Authorization", "Content-Type", "X-Request-Id")
"""Headers of requests that engines get."""


class Proxy:
    """Sends each request to the next engine of each kind."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str], prefill_timeout_s: float = 60.0) -> None:
        """`prefill` and `decode`: the engines' URLs. A prompt that takes longer is computed by the decoding engine."""
        self._prefill: Iterator[str] = itertools.cycle(prefill)
        self._decode: Iterator[str] = itertools.cycle(decode)
        self._prefill_timeout = ClientTimeout(total=prefill_timeout_s)

    def app(self) -> web.Application:
        """The application. Run it with `handler_cancellation`: clients that leave end their requests."""
        app = web.Application(client_max_size=1 << 30)
        app.cleanup_ctx.append(self._open)
        for path in DIVIDED:
            app.router.add_post(path, self._divided)
        app.router.add_route("*", "/{path:.*}", self._whole)
        return app

    async def _open(self, app: web.Application) -> AsyncIterator[None]:
        async with ClientSession(timeout=ClientTimeout(total=None, sock_connect=10)) as self._session:
            yield

    async def _divided(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        try:
            body = json.loads(data)
            told = await self._computed(request, body)
        except (ValueError, TypeError, ClientError, asyncio.TimeoutError):
            told = None  # the decoding engine computes the prompt, or says what is wrong with the request
        if told is not None:
            data = json.dumps({**body, "kv_transfer_params": told}).encode()
        return await self._relayed(request, data)

    async def _computed(self, request: web.Request, body: dict[str, Any]) -> dict[str, Any] | None:
        """Have the prompt computed. Returns what the decoding engine is told. None: nothing."""
        asked = {**body, "max_tokens": 1, "n": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
        for name in ("max_completion_tokens", "min_tokens", "stream_options"):
            asked.pop(name, None)
        async with self._session.post(
            next(self._prefill) + request.path, json=asked, headers=_headers(request), timeout=self._prefill_timeout
        ) as answer:
            return (await answer.json()).get("kv_transfer_params") if answer.status == 200 else None

    async def _whole(self, request: web.Request) -> web.StreamResponse:
        return await self._relayed(request, await request.read())

    async def _relayed(self, request: web.Request, data: bytes) -> web.StreamResponse:
        """Send a request to a decoding engine, and its answer to the client, as it comes."""
        url = next(self._decode) + request.path_qs
        try:
            async with self._session.request(request.method, url, data=data, headers=_headers(request)) as answer:
                response = web.StreamResponse(status=answer.status)
                response.content_type = answer.content_type
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response
        except ClientConnectorError as error:
            return web.json_response({"error": {"message": f"the decoding engine is gone: {error}"}}, status=502)


def _headers(request: web.Request) -> dict[str, str]:
    return {name: request.headers[name] for name in FORWARDED if name in request.headers}


def main() -> None:
    """Run the proxy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", nargs="+", required=True, metavar="URL")
    parser.add_argument("--decode", nargs="+", required=True, metavar="URL")
    args = parser.parse_args()
    web.run_app(Proxy(args.prefill, args.decode).app(), host=args.host, port=args.port, handler_cancellation=True)


if __name__ == "__main__":
    main()
