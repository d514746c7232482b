"""A proxy in front of engines that only encode images and engines that generate texts.

    raycore serve MODEL --port 8001 --ec-transfer-config '{"ec_role": "ec_producer", ...}'
    raycore serve MODEL --port 8002 --ec-transfer-config '{"ec_role": "ec_consumer", ...}'
    python examples/image_proxy.py --encoders http://localhost:8001 --engines http://localhost:8002

Each image of a chat request goes to an encoder first, all at the same time. Then the whole request goes to an engine,
which finds the embeddings where the encoders have put them. An encoder that fails costs time: the engine encodes the
image itself. Everything else goes to an engine at once.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
from collections.abc import Iterator
from typing import Any

import aiohttp
from aiohttp import web

logger = logging.getLogger("image_proxy")

IMAGES = ("image_url", "image_embeds")
HOP_BY_HOP = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}
MAX_BODY_BYTES = 256 << 20


def image_parts(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the parts of a chat request that are images, wherever its messages have them."""
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and any(name == part.get("type") or name in part for name in IMAGES):
                yield part


class ImageProxy:
    """Sends requests on. Encoders and engines take turns."""

    def __init__(self, encoders: list[str], engines: list[str], encoder_timeout_s: float) -> None:
        self._encoders = itertools.cycle(encoders)
        self._engines = itertools.cycle(engines)
        self._encoder_timeout = aiohttp.ClientTimeout(encoder_timeout_s)
        self._session: aiohttp.ClientSession

    async def session(self, app: web.Application) -> Any:
        """Hold connections as long as the proxy runs."""
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as self._session:
            yield

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Have images encoded, then answer as an engine does."""
        data = await request.read()
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        if request.method == "POST" and request.path == "/v1/chat/completions":
            await self._encode_images(data, headers)
        url = next(self._engines) + request.raw_path
        try:
            answer = await self._session.request(request.method, url, data=data, headers=headers)
        except aiohttp.ClientError as error:
            raise web.HTTPBadGateway(text=f"{url}: {error}") from error
        async with answer:
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP}
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    async def _encode_images(self, data: bytes, headers: dict[str, str]) -> None:
        try:
            body = json.loads(data)
        except ValueError:
            body = None
        if not isinstance(body, dict):
            return  # the engine says what is wrong
        # what decides how an image is processed, or who may ask
        kept = {name: body[name] for name in ("model", "mm_processor_kwargs") if name in body}
        asked = [
            {**kept, "messages": [{"role": "user", "content": [part]}], "max_tokens": 1} for part in image_parts(body)
        ]
        await asyncio.gather(*(self._encode(each, headers) for each in asked))

    async def _encode(self, body: dict[str, Any], headers: dict[str, str]) -> None:
        url = next(self._encoders) + "/v1/chat/completions"
        try:
            async with self._session.post(url, json=body, headers=headers, timeout=self._encoder_timeout) as answer:
                if answer.status != 200:
                    logger.warning("%s answers %d: the engine encodes the image", url, answer.status)
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            logger.warning("%s can't be asked (%s): the engine encodes the image", url, error or type(error).__name__)


def make_app(encoders: list[str], engines: list[str], encoder_timeout_s: float = 30.0) -> web.Application:
    """Return the proxy's application."""
    proxy = ImageProxy(encoders, engines, encoder_timeout_s)
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.cleanup_ctx.append(proxy.session)
    app.router.add_route("*", "/{path:.*}", proxy.forward)
    return app


def main() -> None:
    """Run the proxy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoders", nargs="+", required=True, metavar="URL")
    parser.add_argument("--engines", nargs="+", required=True, metavar="URL")
    parser.add_argument("--encoder-timeout-s", type=float, default=30.0)
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    app = make_app(arguments.encoders, arguments.engines, arguments.encoder_timeout_s)
    web.run_app(app, port=arguments.port)


if __name__ == "__main__":
    main()
