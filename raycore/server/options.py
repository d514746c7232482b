"""Options of a server. Flags have vLLM's names.

Each option is declared once, by an `option(...)` at its field: see `raycore.options`. This module imports little,
because even `raycore --help` imports it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from raycore import plugins
from raycore.errors import InvalidConfig
from raycore.options import check_options, option, options_of

TOOL_CALL_PARSERS = ("hermes", "qwen3_coder", "qwen3_xml", "llama3_json")
"""The keys of `raycore.server.parsers.tool_calls.PARSERS`. Importing that module would make `raycore --help` slow."""

REASONING_PARSERS = ("deepseek_r1", "qwen3")
"""The keys of `raycore.server.parsers.reasoning.PARSERS`."""

_Count = Annotated[int, Meta(ge=1)]


def _names(names: str | Sequence[str]) -> Sequence[str]:
    return (names,) if isinstance(names, str) else names


def _usable_keys(keys: str | Sequence[str]) -> Sequence[str]:
    for number, key in enumerate(_names(keys), 1):
        if key != str.strip(key, " \t\r\n") or not key:  # a secret: not in the message
            raise InvalidConfig(f"API key {number} is empty or has white space around it, so no client could send it")
    return _names(keys)


def _tool_call_parser(tool_call_parser: str | None) -> str | None:
    return _known("tool_call_parser", tool_call_parser, TOOL_CALL_PARSERS, plugins.TOOL_PARSERS)


def _reasoning_parser(reasoning_parser: str | None) -> str | None:
    return _known("reasoning_parser", reasoning_parser, REASONING_PARSERS, plugins.REASONING_PARSERS)


def _known(option: str, name: Any, own: Sequence[str], group: str) -> str | None:
    """Check that a parser has this name. The text `none` stands for None, as it does for options with choices."""
    if name in own or (isinstance(name, str) and name in plugins.plugin_names(group)):
        return name
    if isinstance(name, str) and name.lower() == "none":
        return None
    known = [*own, *plugins.plugin_names(group)]
    raise InvalidConfig(f"{option}={name!r} isn't {', '.join(map(repr, known))} or None")


def _either(names: Sequence[str]) -> str:
    return ", ".join([*map(repr, names), "the name of a plugin"])


class ServerOptions(msgspec.Struct, frozen=True):
    """Options of the OpenAI API, without those of the engine.

    Raises:
        InvalidConfig: from the constructor, if a value is invalid.
    """

    served_model_names: Annotated[
        tuple[str, ...],
        option(
            "Names that requests may give as `model`. The first is used if a request gives none.",
            name="served_model_name",
            default="the model's path",
            convert=_names,
        ),
    ]
    api_keys: Annotated[
        tuple[str, ...],
        option(
            "Accepted API keys. Clients send one as `Authorization: Bearer KEY`.",
            name="api_key",
            metavar="KEY",
            default="the variable RAYCORE_API_KEY if it is set, else no key is required",
            convert=_usable_keys,
            is_secret=True,
            is_http=True,
        ),
    ] = ()
    chat_template: Annotated[
        str | None,
        option(
            "The template that renders conversations as prompts: Jinja text, or the path of a file.",
            metavar="FILE_OR_TEXT",
            default="the checkpoint's template",
        ),
    ] = None
    """Jinja text, or the name of one of the checkpoint's templates."""
    trust_request_chat_template: Annotated[
        bool, option("Allow requests to set `chat_template`. Otherwise they are rejected.")
    ] = False
    tool_call_parser: Annotated[
        str | None,
        option(
            "The format of the model's tool calls. If it isn't given or detected, requests with tools are rejected.",
            default="detected from the chat template",
            expected=_either(TOOL_CALL_PARSERS),
            convert=_tool_call_parser,
        ),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        option(
            "The format of the model's reasoning. Chat responses then have it in `reasoning`, separate from `content`.",
            default="reasoning is left in `content`",
            expected=_either(REASONING_PARSERS),
            convert=_reasoning_parser,
        ),
    ] = None
    max_body_bytes: Annotated[
        _Count,
        option(
            "Maximum size of a request body in bytes. While the server parses a body, other requests wait: a large "
            "part of a second for 4 MiB of small values.",
            is_http=True,
        ),
    ] = 4 << 20
    body_timeout_s: Annotated[
        float, Meta(gt=0), option("Seconds within which a request's body must arrive.", is_http=True)
    ] = 60.0
    max_n: Annotated[_Count, option("Maximum `n` of a request.")] = 128
    max_logprobs: Annotated[
        int, Meta(ge=0), option("Maximum number of log probabilities per token that a request may ask for.")
    ] = 20
    max_stop_strings: Annotated[int, Meta(ge=0), option("Maximum number of stop strings in a request.")] = 16
    max_bad_words: Annotated[
        int,
        Meta(ge=0),
        option("Maximum number of bad words in a request. Each of them costs time at every token."),
    ] = 128
    max_word_characters: Annotated[_Count, option("Maximum number of characters of a stop string or bad word.")] = 1024
    max_sequences: Annotated[
        _Count,
        option("Maximum number of sequences in a request to /v1/completions: number of prompts times `n`."),
    ] = 2048
    max_streams: Annotated[
        _Count,
        option(
            "Maximum number of requests in progress, of all API servers together. Each API server accepts an equal "
            "share. Further requests get status 429.",
            name="max_concurrent_requests",
            is_http=True,
        ),
    ] = 4096
    enable_admin_endpoints: Annotated[
        bool,
        option(
            "Serve the paths that control the engine: pause, resume, sleep, wake_up, reset_prefix_cache, "
            "start_profile, stop_profile. Needs an API key.",
            is_http=True,
        ),
    ] = False

    def __post_init__(self) -> None:
        """Check the values. Raises InvalidConfig if a value is invalid."""
        for each in SERVER_OPTIONS.values():
            each.check(getattr(self, each.field))
        if self.enable_admin_endpoints and not self.api_keys:
            raise InvalidConfig(
                "enable_admin_endpoints (--enable-admin-endpoints) needs an API key, because everyone who reaches the "
                "server could control the engine: give --api-key KEY, or set RAYCORE_API_KEY"
            )


SERVER_OPTIONS = {each.name: each for each in options_of(ServerOptions, "Server")}
"""All options of a server, by keyword argument."""


def server_options(model: str, given: Mapping[str, Any]) -> ServerOptions:
    """The server options from keyword arguments as in `SERVER_OPTIONS`. The default of `served_model_name` is `model`.

    Raises:
        InvalidConfig: an option is unknown or invalid, or the chat template is neither a file nor Jinja text.
    """
    checked = check_options(SERVER_OPTIONS, given)
    chosen = {SERVER_OPTIONS[name].field: value for name, value in checked.items()}
    chosen["served_model_names"] = chosen.get("served_model_names") or (model,)
    chosen["chat_template"] = read_chat_template(chosen.get("chat_template"))
    return ServerOptions(**chosen)


def api_keys_of_environment() -> tuple[str, ...]:
    """The API key in the environment variable RAYCORE_API_KEY; empty if the variable isn't set."""
    return tuple(key for key in [os.environ.get("RAYCORE_API_KEY")] if key)


@dataclass(frozen=True)
class TraceOptions:
    """Where to send OpenTelemetry traces."""

    endpoint: str
    """URL of an OTLP collector. If its path is `/v1/traces`, spans are sent over HTTP, otherwise over gRPC."""
    environment: dict[str, str] = field(repr=False)
    """OpenTelemetry's variables (`OTEL_…`) from the driver's environment, which API server processes don't inherit."""


def read_chat_template(given: str | None) -> str | None:
    """The text of a chat template that is given as text or as the path of a file.

    Raises:
        InvalidConfig: `given` is neither Jinja text nor the path of a file.
    """
    if given is None or "{" in given:
        return given
    path = Path(given)
    if not path.is_file():
        raise InvalidConfig(f"chat_template={given} is neither an existing file nor a Jinja template")
    return path.read_text(encoding="utf-8")
