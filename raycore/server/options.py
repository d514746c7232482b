"""What an operator decides about a server. Flags are vLLM's.

Each option is declared once, by an `option(...)` at its field: see `raycore.options`. The command line imports this
file before anything heavy.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from raycore.errors import InvalidConfig
from raycore.options import check_options, option, options_of

ToolCallParserName = Literal["hermes", "qwen3_coder", "qwen3_xml", "llama3_json"]
"""Those of `raycore.server.parsers.tool_calls.PARSERS`, which is too heavy to import for `raycore --help`."""

ReasoningParserName = Literal["deepseek_r1", "qwen3"]
"""Those of `raycore.server.parsers.reasoning.PARSERS`."""

_Count = Annotated[int, Meta(ge=1)]


def _names(names: str | Sequence[str]) -> Sequence[str]:
    return (names,) if isinstance(names, str) else names


def _usable_keys(keys: str | Sequence[str]) -> Sequence[str]:
    for number, key in enumerate(_names(keys), 1):
        if key != str.strip(key, " \t\r\n") or not key:  # not said: it is a secret
            raise InvalidConfig(f"API key {number} is empty, or has blanks around it, so no client could send it")
    return _names(keys)


class ServerOptions(msgspec.Struct, frozen=True):
    """How the OpenAI API is served, apart from the engine behind it.

    Raises:
        InvalidConfig: from the constructor, when a value can't work.
    """

    served_model_names: Annotated[
        tuple[str, ...],
        option(
            "Names by which clients may ask for the model. Answers carry the first.",
            name="served_model_name",
            default="the model's path",
            convert=_names,
        ),
    ]
    api_keys: Annotated[
        tuple[str, ...],
        option(
            "Keys of which a client has to send one, as `Authorization: Bearer KEY`.",
            name="api_key",
            metavar="KEY",
            default="RAYCORE_API_KEY; without it everybody may ask",
            convert=_usable_keys,
            is_secret=True,
            is_http=True,
        ),
    ] = ()
    chat_template: Annotated[
        str | None,
        option(
            "How a conversation becomes a prompt: Jinja text, or a file of it.",
            metavar="FILE_OR_TEXT",
            default="the checkpoint's own",
        ),
    ] = None
    """Here, not on the command line, it may be the name of one of the checkpoint's several."""
    trust_request_chat_template: Annotated[bool, option("Let requests bring chat templates of their own.")] = False
    tool_call_parser: Annotated[
        ToolCallParserName | None,
        option("The form in which the model writes tool calls.", default="found from the chat template"),
    ] = None
    reasoning_parser: Annotated[
        ReasoningParserName | None,
        option(
            "The form in which the model writes its reasoning, which then is apart from the content.",
            default="none: reasoning is part of the content",
        ),
    ] = None
    max_body_bytes: Annotated[
        _Count,
        option(
            "Bytes of a request's body, at most. Reading one of 4 MiB that is full of small values holds up all other "
            "requests for a good part of a second.",
            is_http=True,
        ),
    ] = 4 << 20
    body_timeout_s: Annotated[
        float, Meta(gt=0), option("Seconds for a request's body to come, after its headers.", is_http=True)
    ] = 60.0
    max_n: Annotated[_Count, option("Choices of a request (`n`), at most.")] = 128
    max_logprobs: Annotated[
        int, Meta(ge=0), option("Log probabilities that a request may ask for, for each token.")
    ] = 20
    max_stop_strings: Annotated[int, Meta(ge=0), option("Stop strings of a request, at most.")] = 16
    max_bad_words: Annotated[
        int, Meta(ge=0), option("Bad words of a request, at most. Each is looked for at every token.")
    ] = 128
    max_word_characters: Annotated[_Count, option("Characters of each stop string and each bad word, at most.")] = 1024
    max_sequences: Annotated[_Count, option("Sequences of one completion request, at most: its prompts times `n`.")] = (
        2048
    )
    max_streams: Annotated[
        _Count,
        option(
            "Requests under way at the same time, at most. Further ones get the status 429.",
            name="max_concurrent_requests",
            is_http=True,
        ),
    ] = 4096

    def __post_init__(self) -> None:
        """Raises InvalidConfig when a value can't work."""
        for each in SERVER_OPTIONS.values():
            each.check(getattr(self, each.field))


SERVER_OPTIONS = {each.name: each for each in options_of(ServerOptions, "Server")}
"""All options of a server, by keyword."""


def server_options(model: str, given: Mapping[str, Any]) -> ServerOptions:
    """What was chosen among `SERVER_OPTIONS`, by keyword. The model goes by its path unless it has a name.

    Raises:
        InvalidConfig: an option isn't known, or can't work; or a chat template is neither a file nor Jinja text.
    """
    checked = check_options(SERVER_OPTIONS, given)
    chosen = {SERVER_OPTIONS[name].field: value for name, value in checked.items()}
    chosen["served_model_names"] = chosen.get("served_model_names") or (model,)
    chosen["chat_template"] = read_chat_template(chosen.get("chat_template"))
    return ServerOptions(**chosen)


def api_keys_of_environment() -> tuple[str, ...]:
    """What RAYCORE_API_KEY says: one key, or none."""
    return tuple(key for key in [os.environ.get("RAYCORE_API_KEY")] if key)


@dataclass(frozen=True)
class TraceOptions:
    """Where OpenTelemetry traces go."""

    endpoint: str
    """A collector's URL. With the path `/v1/traces` it is spoken to in OTLP over HTTP, else over gRPC."""
    environment: dict[str, str] = field(repr=False)
    """OpenTelemetry's own variables (`OTEL_…`), as the program has them: its API servers don't inherit them."""


def read_chat_template(given: str | None) -> str | None:
    """A chat template as text: given as such, or as a file.

    Raises:
        InvalidConfig: it is neither.
    """
    if given is None or "{" in given:
        return given
    path = Path(given)
    if not path.is_file():
        raise InvalidConfig(f"chat_template={given}: there is no such file, and it is no Jinja text")
    return path.read_text(encoding="utf-8")
