"""Images and URLs that somebody sends to harm a server, and servers that they name."""

from __future__ import annotations

import base64
import io
import os
import random
import socket
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from PIL import Image

from raycore.parts.images.client.images import FORMATS

PUBLIC = "127.0.0.1"
"""The only address that the tests take for public: the one of the server of images."""
INTERNAL = "127.0.0.2"
"""Where a server is that nobody may reach."""
PRIVATE = (
    *("10.0.0.1", "172.16.5.5", "192.168.1.1", "127.0.0.1", "127.9.9.9", "169.254.169.254", "0.0.0.0", "100.64.0.1"),
    *("224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "203.0.113.5", "192.0.0.8"),
    *("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "ff02::1", "2001:db8::1", "2001::7f00:1"),
    *("::ffff:127.0.0.1", "::ffff:10.1.1.1", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::1", "2002:7f00:1::1"),
    *("2002:c0a8:101::", "not an address", ""),
)


def encoded(fmt: str, size: tuple[int, int] = (61, 43)) -> bytes:
    """An image of noise, which compresses badly."""
    rng = random.Random(fmt)
    image = Image.frombytes("RGB", size, rng.randbytes(3 * size[0] * size[1]))
    buffer = io.BytesIO()
    image.save(buffer, fmt)
    return buffer.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *chunks: bytes, depth: int = 8, color: int = 2, pixels: bytes = b"") -> bytes:
    header = _png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0))
    end = _png_chunk(b"IDAT", pixels) + _png_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + end


def malformed() -> Iterator[tuple[str, bytes]]:
    """Damaged images of each format."""
    for fmt in FORMATS:
        data = encoded(fmt)
        for cut in (1, 3, 8, 16, 24, len(data) // 10, len(data) // 3, len(data) // 2):
            yield f"{fmt} cut after {cut}", data[:cut]
        yield f"{fmt} with noise after its header", data[:12] + random.Random(fmt).randbytes(len(data) - 12)
        yield f"{fmt} with zeros after its header", data[:12] + bytes(len(data) - 12)


def huge() -> Iterator[tuple[str, bytes]]:
    """Images that say that they are large, and some that are."""
    for width, height in ((100_000, 100_000), (2**31 - 1, 2**31 - 1), (2**31 - 1, 1), (1, 60_000_000), (7100, 7100)):
        yield f"PNG of {width}x{height}", png(width, height)
        yield (
            f"BMP of {width}x{height}",
            b"BM" + struct.pack("<IHHIIiiHH", 0, 0, 0, 54, 40, width, height, 1, 24) + bytes(24),
        )
        yield f"PPM of {width}x{height}", f"P6 {width} {height} 255\n".encode() + bytes(64)
    yield "GIF of 65535x65535", b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + bytes(32)
    jpeg = bytearray(encoded("JPEG"))
    start = jpeg.index(b"\xff\xc0") + 5
    jpeg[start : start + 4] = struct.pack(">HH", 65500, 65500)
    yield "JPEG of 65500x65500", bytes(jpeg)
    size = (2**24 - 2).to_bytes(3, "little")
    yield (
        "WEBP of 16777215x16777215",
        b"RIFF" + struct.pack("<I", 40) + b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + size * 2,
    )
    tags = struct.pack("<HHIIHHII", 256, 4, 1, 2**20, 257, 4, 1, 2**20)
    yield "TIFF of 1048576x1048576", b"II*\0" + struct.pack("<IH", 8, 2) + tags + bytes(4)
    for width, height in ((16000, 16000), (32000, 2000), (8000, 8000)):
        bits = zlib.compress(bytes((width // 8 + 1) * height), 9)
        yield f"PNG that is {width}x{height}", png(width, height, depth=1, color=0, pixels=bits)
    bomb = zlib.compress(bytes(200 << 20), 9)
    for kind in (b"zTXt", b"iCCP", b"iTXt"):
        middle = b"a\0\1\0\0\0" if kind == b"iTXt" else b"a\0\0"
        yield f"PNG with a {kind.decode()} of 200 MiB", png(8000, 8000, _png_chunk(kind, middle + bomb))


def no_images() -> Iterator[tuple[str, bytes]]:
    """Other files, some of which other programs would run."""
    yield "nothing", b""
    yield "SVG", b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
    yield "EPS", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) (r) file\n"
    yield "PDF", b"%PDF-1.7\n"
    yield "WMF", b"\xd7\xcd\xc6\x9a" + bytes(60)
    yield "ZIP", b"PK\x03\x04" + bytes(60)
    yield "gzip", b"\x1f\x8b\x08" + bytes(60)
    yield "HTML", b"<html><script>alert(1)</script></html>"
    yield "pickle", b"\x80\x04cposix\nsystem\n(S'true'\ntR."
    yield "numpy", b"\x93NUMPY\x01\x00" + bytes(60)
    yield "FITS", b"SIMPLE  =                    T" + bytes(2880)
    yield "MPEG", b"\x00\x00\x01\xb3" + bytes(60)
    yield "XPM", b"/* XPM */\nstatic char *a[] = {\n"
    yield "PSD", b"8BPS\x00\x01" + bytes(60)


def bad_urls(max_bytes: int) -> Iterator[tuple[str, Any]]:
    """URLs that are wrong, or name hosts that nobody allowed."""
    good = base64.b64encode(encoded("PNG")).decode()
    yield from enumerate_named(
        "data URL",
        [
            "data:",
            "data:,",
            "data:image/png",
            "data:image/png,abc",
            f"data:image/png;base64 {good}",
            "data:image/png;base64,a",
            "data:image/png;base64,€€€€",
            f"data:image/png;base64,{good[:41]}!{good[41:]}",
            f"data:text/html;base64,{good}",
            f"data:video/mp4;base64,{good}",
            f"data:application/pdf;base64,{good}",
            f"data:image/png;charset=x,{good}",
            "data:image/png;base64," + "A" * (2 * max_bytes),
            "data:image/png;base64,%00%ff",
        ],
    )
    yield from enumerate_named(
        "URL",
        [
            "",
            " ",
            "image.png",
            "//images.test/good",
            "ftp://images.test/good",
            "gopher://images.test/_x",
            "jar:http://images.test",
            "javascript:alert(1)",
            "http:",
            "http://",
            "http:///good",
            "http://other.test/good",
            "http://images.test.evil.test/",
            "http://images.test@evil.test/",
            "http://evil.test#@images.test/",
            "http://images.test:pass@images.test/",
            "http://images.test\\@evil.test/",
            "http://images.test:99999/",
            "http://images.test:x/",
            "http://images.test/\r\nX: y",
            "http://images.test/ good",
            "http://\u0131mages.test/",
            "http://[::1",
            "http://[::1]/",
            "http://127.0.0.1/",
            "http://2130706433/",
            "http://0x7f.1/",
            "http://localhost/",
            "http://IMAGES.TEST.:80/",
            "http://images.test/" + "a" * 9000,
            "http://images.test\0/",
            "http://169.254.169.254/latest/meta-data/",
            "file:",
            "\ud800",
        ],
    )


def enumerate_named(name: str, values: list[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"{name} {index}: {str(value)[:60]!a}", value) for index, value in enumerate(values))


def bad_files(root: Path, outside: Path) -> Iterator[tuple[str, str]]:
    """File URLs that lead out of `root`, or to what isn't a file. Makes what they name."""
    secret, inside = outside / "secret.png", root / "folder"
    secret.write_bytes(encoded("PNG"))
    inside.mkdir()
    (inside / "text.png").write_text("no image")
    (root / "link.png").symlink_to(secret)
    (root / "relative.png").symlink_to(Path("..") / outside.name / "secret.png")
    (root / "elsewhere").symlink_to(outside)
    (root / "loop").symlink_to(root / "loop")
    (root / "zero").symlink_to("/dev/zero")
    os.mkfifo(root / "fifo")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(root / "socket"))
    listening.close()
    with (root / "large.png").open("wb") as large:
        large.truncate(1 << 40)
    paths = [
        *(
            "/etc/passwd",
            "/proc/self/environ",
            "/dev/zero",
            "/dev/stdin",
            str(secret),
            str(root),
            f"{root}/",
            f"{root}/.",
        ),
        *(f"{root}/../{outside.name}/secret.png", f"{root}/folder/../../{outside.name}/secret.png", f"{root}-x/a.png"),
        *(f"{root}/%2e%2e/{outside.name}/secret.png", f"{root}/..%2f{outside.name}/secret.png", f"{root}/a%00.png"),
        *(f"{root}/link.png", f"{root}/relative.png", f"{root}/elsewhere/secret.png", f"{root}/loop", f"{root}/zero"),
        *(f"{root}/fifo", f"{root}/socket", f"{root}/large.png", f"{root}/missing.png", f"{root}/folder"),
        *(f"{root}/folder/text.png", f"{root}/folder/text.png/x", "/" + "a" * 5000),
    ]
    for path in paths:
        yield f"file {path[-60:]}", f"file://{path}"
    for url in (f"file://host{root}/a.png", f"file:{inside}/text.png?x", "file:relative.png", f"FILE://{secret}"):
        yield f"file {url[-60:]}", url


def bad_parts() -> Iterator[tuple[str, dict[str, Any]]]:
    """Content parts that are no images."""
    for part in (
        *({"type": "image_url"}, {"type": "image_url", "image_url": {}}, {"type": "image_url", "image_url": 5}),
        *({"type": "image_url", "image_url": {"url": None}}, {"type": "image_url", "image_url": {"url": ["a"]}}),
        *({"type": "video_url", "video_url": {"url": "data:"}}, {"type": "input_audio", "input_audio": {}}),
        *({"type": "image_embeds", "image_embeds": "AAAA"}, {"type": "image_pil", "image_pil": "a"}, {"type": "image"}),
        *({"type": "image_url", "image_url": {"url": "data:"}, "uuid": 5}, {"type": "file", "file": {}}),
        *({"type": "image", "image": "/etc/passwd"}, {"type": "image_url", "uuid": "nobody's"}),
    ):
        yield f"part {part}", part


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        getattr(self, f"_{self.path.strip('/').partition('/')[0]}", self._missing)()

    def _send(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def _good(self) -> None:
        self._send(encoded("PNG"))

    def _missing(self) -> None:
        self._send(b"no", 404)

    def _broken(self) -> None:
        self._send(b"no", 500)

    def _forbidden(self) -> None:
        self._send(b"no", 403)

    def _html(self) -> None:
        self._send(b"<html>")

    def _empty(self) -> None:
        self._send(b"")

    def _nothing(self) -> None:
        self.close_connection = True

    def _large(self) -> None:
        self._send(b"x", Content_Length=str(1 << 40))

    def _endless(self) -> None:
        self.send_response(200)
        self.end_headers()
        while not self.wfile.closed:
            self.wfile.write(bytes(1 << 16))

    def _chunked(self) -> None:
        self.protocol_version = "HTTP/1.1"
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while True:
            self.wfile.write(b"10000\r\n" + bytes(1 << 16) + b"\r\n")

    def _short(self) -> None:
        self._send(encoded("PNG")[:100], Content_Length="5000")

    def _zipped(self) -> None:
        self._send(zlib.compress(bytes(1 << 20)), Content_Encoding="deflate")

    def _slow(self) -> None:
        self.send_response(200)
        self.end_headers()
        for _ in range(600):
            self.wfile.write(b"x")
            self.wfile.flush()
            if self.server.stopped.wait(0.05):  # type: ignore[attr-defined]
                return

    def _silent(self) -> None:
        self.server.stopped.wait(30)  # type: ignore[attr-defined]

    def _headers(self) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * (1 << 17) + b"\r\n\r\n")

    def _protocol(self) -> None:
        self.wfile.write(b"SSH-2.0-OpenSSH\r\n")

    def _to(self) -> None:
        from urllib.parse import unquote

        self._send(b"", 302, Location=unquote(self.path.partition("/to/")[2]))

    def _around(self) -> None:
        self._send(b"", 301, Location="/around")


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """The client leaves as it likes."""


@contextmanager
def web_server(address: str) -> Iterator[_Server]:
    """A server of images at a local address, with pages that do what they shouldn't. `asked` has the paths."""
    server = _Server((address, 0), _Handler)
    server.asked = []  # type: ignore[attr-defined]
    server.stopped = threading.Event()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stopped.set()  # type: ignore[attr-defined]
        server.shutdown()
        server.server_close()
        thread.join(10)


BAD_PAGES = (
    *("missing", "broken", "forbidden", "html", "empty", "nothing", "large", "endless", "chunked", "short", "zipped"),
    *("slow", "silent", "headers", "protocol", "around"),
)
