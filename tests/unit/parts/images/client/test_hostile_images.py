"""Whatever is sent as an image: the answer is a clear 400, nothing is fetched or read that isn't allowed, and memory is
back where it was."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from asgi_client import Client
from fake_engine import FakeEngine
from hostile_images import (
    BAD_PAGES,
    INTERNAL,
    PRIVATE,
    PUBLIC,
    bad_files,
    bad_parts,
    bad_urls,
    data_url,
    encoded,
    huge,
    malformed,
    no_images,
    web_server,
)
from own_memory import resident_bytes
from vision_checkpoints import QWEN2_5

from raycore.config import resolve
from raycore.errors import InvalidRequest
from raycore.parts.images.client.addresses import is_public
from raycore.parts.images.client.fetching import Fetcher
from raycore.parts.images.client.inputs import ImageInputs
from raycore.server import ServerOptions, build_app, load_adapters
from raycore.text.tokenizer import Tokenizer

MAX_BYTES = 1 << 20
HOSTS = {f"private-{index}.test": [address] for index, address in enumerate(PRIVATE) if address != PUBLIC}
HOSTS |= {
    "images.test": [PUBLIC],
    "internal.test": [INTERNAL],
    "mixed.test": [PUBLIC, "10.0.0.1"],
    "no-address.test": [],
}


def url_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def web_urls(port: int, internal_port: int) -> Iterator[tuple[str, str]]:
    for page in BAD_PAGES:
        yield f"page {page}", f"http://images.test:{port}/{page}"
    yield "TLS with a server that has none", f"https://images.test:{port}/good"
    yield "nobody listens", "http://images.test:1/good"
    for host in HOSTS:
        if host != "images.test":
            yield f"host {host} {HOSTS[host]}", f"http://{host}:{internal_port}/secret"
    for target in (
        f"http://internal.test:{internal_port}/secret",
        f"http://{INTERNAL}:{internal_port}/secret",
        "http://169.254.169.254/latest/meta-data/",
        "http://localhost/",
        "http://other.test/",
        "file:///etc/passwd",
        "ftp://images.test/",
        "data:image/png;base64,AAAA",
        f"//internal.test:{internal_port}/secret",
        f"http://images.test:{port}/to/http://internal.test:{internal_port}/secret",
        f"http://images.test@internal.test:{internal_port}/secret",
    ):
        yield f"redirected to {target}", f"http://images.test:{port}/to/{target}"
    yield "another address after a redirect", f"http://rebinding.test:{port}/around"


class Resolver:
    """Answers as the table says, and for one host first with a public address, then with one of the internal server."""

    def __init__(self) -> None:
        self.rebinding = itertools.cycle([[PUBLIC], [INTERNAL]])

    def __call__(self, host: str, port: int, timeout_s: float) -> list[str]:
        return next(self.rebinding) if host == "rebinding.test" else HOSTS[host]


@pytest.fixture
def server(checkpoint, tmp_path: Path) -> Client:
    """A server of a model that takes images, without ranks."""
    (tmp_path / "root").mkdir()
    (tmp_path / "outside").mkdir()
    path = checkpoint(QWEN2_5)
    hosts = [*HOSTS, "rebinding.test"]
    options = {"allowed_media_domains": hosts, "allowed_local_media_path": str(tmp_path / "root")}
    tokenizer = Tokenizer.from_dir(path)
    config = resolve(str(path), max_image_bytes=MAX_BYTES, max_model_len=1024, mm_processor_cache_gb=0, **options)
    engine = FakeEngine(tokenizer=tokenizer, max_model_len=1024)
    engine._limits = replace(engine._limits, encoder=config.encoder_limits)
    images = engine.images = ImageInputs(config, tokenizer)
    images._sources._fetcher = Fetcher(
        hosts, MAX_BYTES, 0.4, resolve=Resolver(), is_public=lambda address: address == PUBLIC or is_public(address)
    )
    chosen = ServerOptions(("fake",))
    return Client(build_app(engine, chosen, asyncio.run(load_adapters(engine, chosen))))


def ask(server: Client, part: dict[str, Any]) -> Any:
    content = [{"type": "text", "text": "What is this?"}, part]
    messages = [{"role": "user", "content": content}]
    return server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})


def settle() -> int:
    """Resident memory, without what the allocator could give back."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return resident_bytes()


def test_hostile_images_get_a_400_and_leave_nothing_behind(server: Client, tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    with web_server(PUBLIC) as web, web_server(INTERNAL) as internal:
        images = [*malformed(), *huge(), *no_images()]
        parts = [(name, url_part(data_url(data))) for name, data in images if len(data) < MAX_BYTES]
        parts += [(name, url_part(url)) for name, url in bad_urls(MAX_BYTES)]
        parts += [(name, url_part(url)) for name, url in bad_files(root, outside)]
        parts += [(name, url_part(url)) for name, url in web_urls(web.server_port, internal.server_port)]
        parts += list(bad_parts())
        assert len(parts) >= 200
        (root / "good.png").write_bytes(encoded("PNG"))
        good = [data_url(encoded("PNG")), f"file://{root}/good.png", f"http://images.test:{web.server_port}/good"]
        for url in good:
            assert ask(server, url_part(url)).status == 200
        web.asked.clear()
        before = settle()
        wrong = []
        for name, part in parts:
            answer = ask(server, part)
            message = answer.json.get("error", {}).get("message", "") if answer.status == 400 else ""
            if "messages[0]" not in message or len(message) > 600:
                wrong.append((name, answer.status, answer.body[:300]))
        print(f"{len(parts)} hostile images and URLs")
        assert wrong == []
        grown = settle() - before
        assert internal.asked == []
        assert {path.strip("/").partition("/")[0] for path in web.asked} <= {*BAD_PAGES, "to"}
        assert grown < 24 << 20, f"{grown >> 20} MiB stay"
        for url in good:
            assert ask(server, url_part(url)).status == 200


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_of_ones_own_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["93.184.216.34", "1.1.1.1", "2606:2800:220:1::1", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_other_addresses_are_public(address: str) -> None:
    assert is_public(address)


def test_without_the_options_nothing_is_fetched_or_read(checkpoint, tmp_path: Path) -> None:
    path = checkpoint(QWEN2_5)
    images = ImageInputs(resolve(str(path)), Tokenizer.from_dir(path))
    (tmp_path / "a.png").write_bytes(encoded("PNG"))
    with web_server(PUBLIC) as web:
        url = f"http://{PUBLIC}:{web.server_port}/good"
        for given, option in ((url, "allowed_media_domains"), (f"file://{tmp_path}/a.png", "allowed_local_media_path")):
            with pytest.raises(InvalidRequest, match=option):
                images._sources.read(given)
        assert web.asked == []


def test_a_model_of_texts_refuses_an_image_by_its_name(tmp_path: Path) -> None:
    engine = FakeEngine()
    chosen = ServerOptions(("fake",))
    client = Client(build_app(engine, chosen, asyncio.run(load_adapters(engine, chosen))))
    answer = ask(client, url_part(data_url(encoded("PNG"))))
    assert answer.error == (400, "invalid_request_error", "messages")
    assert answer.json["error"]["message"] == "messages has images, but fake takes only texts"
