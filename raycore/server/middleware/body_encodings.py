"""What a request's body is sent as: its compression, its type and its character set. Endpoints get JSON in UTF-8."""

from __future__ import annotations

import zlib
from email.message import Message

from starlette.datastructures import Headers
from starlette.types import Scope

from raycore.json_fields import shortened
from raycore.server.http.bodies import off_loop
from raycore.server.http.errors import APIError

_JSON = "application/json"
_COMPRESSIONS = {
    "gzip": zlib.MAX_WBITS | 16,
    "x-gzip": zlib.MAX_WBITS | 16,
    "deflate": zlib.MAX_WBITS,
}
"""By the name of a compression: zlib's window bits, which say which format it is."""
_UNSAID = frozenset(("", "application/x-www-form-urlencoded", "application/octet-stream", "text/json", "text/plain"))
"""Types that clients send if nobody has told them the body's type."""
_LONGEST_TYPE = 256
"""Maximum length of the header Content-Type. Python reads some types of 60,000 characters for 10 s."""
_TOLD_ANEW = frozenset((b"content-type", b"content-encoding", b"content-length"))


async def as_json(body: bytes, scope: Scope, max_bytes: int) -> bytes:
    """The body of a request, without compression. The headers in `scope` then describe it as it is returned.

    Raises:
        APIError: status 415 if the server can't take what the headers say of the body, 413 if it has more than
            `max_bytes` bytes without compression, 400 if it isn't compressed as they say.
    """
    headers = Headers(scope=scope)
    if not body or (headers.get("content-type") == _JSON and "content-encoding" not in headers):
        return body
    body = await _without_compression(body, headers.get("content-encoding", ""), max_bytes)
    _check_type(headers, body)
    others = [each for each in scope["headers"] if each[0] not in _TOLD_ANEW]
    scope["headers"] = [*others, (b"content-type", _JSON.encode()), (b"content-length", b"%d" % len(body))]
    return body


def too_large(max_bytes: int) -> APIError:
    """The error for a body of more than `max_bytes` bytes."""
    return APIError(413, f"the request body is larger than {max_bytes} bytes", code="request_too_large")


async def _without_compression(body: bytes, encoding: str, max_bytes: int) -> bytes:
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return body
    if name not in _COMPRESSIONS:
        raise APIError(
            415,
            f"the request body has Content-Encoding {shortened(name)}: send it as gzip, deflate, or as it is",
            code="unsupported_encoding",
        )
    # a few bytes may become that many
    return await off_loop(max_bytes, _decompress, body, name, max_bytes)


def _decompress(body: bytes, name: str, max_bytes: int) -> bytes:
    # one byte more than the limit shows that there is more, and a small body can't become a large one
    inflating = zlib.decompressobj(_COMPRESSIONS[name])
    try:
        plain = inflating.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise APIError(400, f"the request body isn't {name}, as its Content-Encoding says: {error}") from error
    if len(plain) > max_bytes:
        raise too_large(max_bytes)
    if not inflating.eof or inflating.unused_data:
        problem = "goes on after its end" if inflating.eof else "is cut short"
        raise APIError(400, f"the request body isn't {name}, as its Content-Encoding says: it {problem}")
    return plain


def _check_type(headers: Headers, body: bytes) -> None:
    given = headers.get("content-type", "")
    if len(given) > _LONGEST_TYPE:
        told = f"the header Content-Type has {len(given)} characters: it may have {_LONGEST_TYPE}"
        raise APIError(415, told, code="unsupported_media_type")
    said = Message()
    said["content-type"] = given
    kind = said.get_content_type() if "content-type" in headers else ""
    # A browser sends bodies of these types for a page of any origin, without asking the server first. It does say the
    # origin. Programs that aren't pages have none, and their users have only forgotten the type.
    is_json = kind == _JSON or kind.endswith("+json") or (kind in _UNSAID and "origin" not in headers)
    if not is_json:
        told = f"the body has Content-Type {shortened(kind)}" if kind else "the body of a web page has no Content-Type"
        raise APIError(415, f"{told}: send JSON, with the header Content-Type: {_JSON}", code="unsupported_media_type")
    charset = str(said.get_param("charset") or "utf-8").lower()
    if not charset.startswith("utf") and not body.isascii():
        raise APIError(
            415, f"the request body has the charset {shortened(charset)}: send it in UTF-8", code="unsupported_charset"
        )
