"""What the answer to a chat consists of: typed parts, from which each API makes its own objects and events. Pure.

`raycore.server.chat.message` runs a chat and yields its parts.
"""

from __future__ import annotations

from dataclasses import dataclass

from raycore.outputs import CompletionOutput, RequestOutput, SampleLogprobs
from raycore.server.parsers.tool_calls import CallArguments, Content


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """The next piece of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool call begins. Its arguments follow, as `CallArguments` with the same index."""

    index: int
    """The call's number in the message, from 0."""
    id: str
    name: str


Part = ReasoningText | Content | CallBegin | CallArguments
"""The next piece of a message. Parts come in the order in which the model writes them."""


@dataclass(frozen=True, slots=True)
class MessageDelta:
    """What a choice has got since its previous `MessageDelta`."""

    index: int
    """The choice's number, from 0."""
    parts: list[Part]
    """May be empty, while it isn't known what the text that has arrived belongs to."""
    token_ids: list[int]
    """The new tokens. Their text isn't always that of the parts: a part is held back until it is certain."""
    logprobs: SampleLogprobs | None
    """The log probabilities at the positions of `token_ids`, if the request asks for some."""
    finish_reason: str | None
    """`tool_calls` instead of `stop` if the message has calls. None: more follows, or the choice ended before."""
    stop_reason: int | str | None
    completion: CompletionOutput
    """All of the choice so far."""
    output: RequestOutput
    """All of the request so far."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Numbers of tokens of a request, of all its choices together."""

    prompt: int
    cached: int
    """Those of the prompt that were in the prefix cache."""
    output: int
    reasoning: int | None
    """Those of the output that are reasoning, with its tags. None: the server has no reasoning parser."""
