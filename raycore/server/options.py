"""What an operator decides about a server. Names follow vLLM's flags."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from raycore.errors import InvalidConfig
from raycore.server.parsers import reasoning as reasoning_parsers
from raycore.server.parsers import tool_calls as tool_parsers


@dataclass(frozen=True)
class ServerOptions:
    """How the OpenAI API is served, apart from the engine behind it."""

    served_model_names: tuple[str, ...]
    """Names that clients may ask for; the first is the one that answers carry."""
    api_keys: tuple[str, ...] = ()
    """Keys of which a client has to send one, as `Authorization: Bearer …`. None: everybody may ask."""
    chat_template: str | None = None
    """Jinja text; None is the checkpoint's own. Here, not on the command line, it may be the name of one of several."""
    trust_request_chat_template: bool = False
    """Whether a request may bring a chat template of its own."""
    tool_call_parser: str | None = None
    """The form in which the model writes tool calls, by `tool_parsers.PARSERS`; None: found from the chat template."""
    reasoning_parser: str | None = None
    """How the model writes what it thinks, by `reasoning_parsers.PARSERS`; None leaves that in the content."""
    max_body_bytes: int = 4 << 20
    """Of a request. Reading one of this size holds up all others for a good part of a second, if it is full of small
    values."""
    body_timeout_s: float = 60.0
    """A body has to be there so long after its request's headers."""
    max_n: int = 128
    max_logprobs: int = 20
    max_stop_strings: int = 16
    max_bad_words: int = 128
    """Each is looked for at every token."""
    max_word_characters: int = 1024
    """Of each stop string and each bad word."""
    max_sequences: int = 2048
    """Of one completion request: its prompts times `n`."""
    max_streams: int = 4096
    """Requests under way at the same time; further ones are told to come again."""

    def __post_init__(self) -> None:
        """Raises InvalidConfig when a value can't work."""
        for number, key in enumerate(self.api_keys, 1):
            if key != key.strip(" \t\r\n") or not key:  # not said: it is a secret
                raise InvalidConfig(f"API key {number} is empty, or has blanks around it, so no client could send it")
        for name in ("max_body_bytes", "max_n", "max_sequences", "max_streams"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"{name}={getattr(self, name)} is not at least 1")
        if self.max_logprobs < 0:
            raise InvalidConfig(f"max_logprobs={self.max_logprobs} is not at least 0")
        if self.tool_call_parser is not None:
            tool_parsers.parser_named(self.tool_call_parser)
        if self.reasoning_parser is not None:
            reasoning_parsers.parser_named(self.reasoning_parser)


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
