"""Options of the HTTP application: what web pages may do, further middleware, and the path that a proxy adds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, cast

import msgspec

from raycore.errors import InvalidConfig
from raycore.json_fields import shortened
from raycore.options.declared import option, options_of


def texts(given: str | Sequence[str]) -> Sequence[str]:
    """Texts that are given as a list, as one text, or as a list in JSON, as vLLM's flags have it."""
    listed: list[Any] = []
    for each in [given] if isinstance(given, str) else given:
        try:
            found: Any = json.loads(each) if each.lstrip().startswith("[") else each
        except ValueError:
            found = each
        listed += cast("list[Any]", found) if isinstance(found, list) else [found]
    return listed


def _middleware(middleware: str | Sequence[str]) -> Sequence[str]:
    for each in texts(middleware):
        module, dot, name = each.rpartition(".")
        if not (dot and module and name.isidentifier()):
            raise InvalidConfig(f"middleware={shortened(each)} isn't the path of a class or function: module.name")
    return texts(middleware)


def _root_path(root_path: str) -> str:
    stripped = root_path.rstrip("/")
    if stripped and not stripped.startswith("/"):
        raise InvalidConfig(f"root_path={shortened(root_path)} doesn't begin with /, as in /api")
    return stripped


class HttpOptions(msgspec.Struct, frozen=True):
    """Options of the application, as far as they concern HTTP in general."""

    allowed_origins: Annotated[
        tuple[str, ...],
        option(
            "Origins whose web pages may call the server from a browser (CORS), such as https://example.com. "
            "*: all. Several may be a list in JSON.",
            metavar="ORIGIN",
            default="*",
            convert=texts,
            is_http=True,
        ),
    ] = ("*",)
    allowed_methods: Annotated[
        tuple[str, ...],
        option("Methods that such pages may use. *: all.", metavar="METHOD", default="*", convert=texts, is_http=True),
    ] = ("*",)
    allowed_headers: Annotated[
        tuple[str, ...],
        option("Headers that such pages may send. *: all.", metavar="HEADER", default="*", convert=texts, is_http=True),
    ] = ("*",)
    allow_credentials: Annotated[
        bool, option("Let such pages send the browser's cookies and certificates with their requests.", is_http=True)
    ] = False
    middleware: Annotated[
        tuple[str, ...],
        option(
            "ASGI middleware around the server, as module.name: a class, or a coroutine function of a request and the "
            "next handler. The last one gets requests first. The flag may be repeated.",
            metavar="MODULE.NAME",
            convert=_middleware,
            is_http=True,
            repeats=True,
        ),
    ] = ()
    root_path: Annotated[
        str,
        option(
            "Path below which a proxy in front of the server offers it, such as /api.",
            metavar="PATH",
            default="none",
            convert=_root_path,
            is_http=True,
        ),
    ] = ""
    disable_fastapi_docs: Annotated[bool, option("Serve neither /docs nor /openapi.json.", is_http=True)] = False


HTTP_OPTIONS = options_of(HttpOptions, "HTTP")
"""The options of `HttpOptions`."""
