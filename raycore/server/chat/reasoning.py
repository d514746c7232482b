"""A model's reasoning in one chat request, on a server with a reasoning parser.

As in vLLM, the output begins with reasoning unless the prompt says otherwise. A constraint applies only to the content;
the reasoning is unconstrained. If a tool call is required that no grammar can express, there is no reasoning: only the
end of the prompt can make the model write such a call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from raycore.outputs import CompletionOutput
from raycore.reasoning_tags import ReasoningTags
from raycore.server.chat.tools import ToolUse
from raycore.server.options import ServerOptions
from raycore.server.parsers.reasoning import ReasoningParser, parser_named, tags_of
from raycore.server.parsers.tags import any_special
from raycore.server.protocol import ChatCompletionRequest
from raycore.structured_outputs import StructuredOutputsParams
from raycore.text.conversation import content_text
from raycore.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Reasoning:
    """How the model writes the reasoning in its answers to one request."""

    parser: type[ReasoningParser]
    is_first: bool
    """Whether the output begins with reasoning."""
    call: str | None
    """The tag that opens a tool call, if the request has tools."""

    @staticmethod
    def of(
        request: ChatCompletionRequest,
        conversation: str,
        template_kwargs: Mapping[str, Any],
        tools: ToolUse | None,
        options: ServerOptions,
    ) -> Reasoning | None:
        """The `Reasoning` of a request; None if the server has no reasoning parser.

        `conversation`: the text of the conversation, rendered by the chat template.
        """
        if options.reasoning_parser is None:
            return None
        parser = parser_named(options.reasoning_parser)
        is_first = _is_open(parser, request, conversation, template_kwargs)
        if tools is None:
            return Reasoning(parser, is_first, None)
        return Reasoning(parser, is_first and tools.allows_reasoning(), tools.parser.opening)

    def reader(self) -> ReasoningParser:
        """A new parser for one of the request's choices."""
        return self.parser(self.is_first, self.call)

    def counter(self, tokenizer: Tokenizer) -> ReasoningCounter:
        """A new counter of the reasoning tokens of one of the request's choices."""
        return ReasoningCounter(self.reader(), tokenizer)

    def postpone(self, constraint: StructuredOutputsParams | None) -> StructuredOutputsParams | None:
        """The same constraint, but applied only to the text after the reasoning."""
        if constraint is None:
            return None
        closing, call = self.ends
        return msgspec.structs.replace(constraint, after=closing, or_from=call)

    @property
    def ends(self) -> tuple[str | None, str | None]:
        """The tags that end the reasoning of an output: the closing tag, and the tag of a tool call, if it may end the
        reasoning. Both are None if the output doesn't begin with reasoning."""
        if not self.is_first:
            return None, None
        return self.parser.closing, self.call if self.parser.calls_end_reasoning else None

    @property
    def tags(self) -> ReasoningTags:
        """How the model writes its reasoning, for `thinking_token_budget`."""
        return msgspec.structs.replace(tags_of(self.parser), is_open=self.is_first)

    def needs_special_tokens(self, tokenizer: Tokenizer) -> bool:
        """Whether the tags are special tokens, which the output's text leaves out by default."""
        return any_special(tokenizer, self.parser.opening, self.parser.closing)


class ReasoningCounter:
    """Counts the reasoning tokens of one choice, including those of the tags."""

    def __init__(self, parser: ReasoningParser, tokenizer: Tokenizer) -> None:
        self._parser = parser
        self._tokenizer = tokenizer
        self._num_seen = 0
        self._count = 0
        self._num_characters = 0
        """Number of characters of the counted tokens."""
        self._undecided: list[int] = []
        """Number of characters of each token that isn't known yet to belong to the reasoning."""

    def count(self, output: CompletionOutput) -> int:
        """Number of tokens of the output so far that certainly belong to the reasoning."""
        new = output.token_ids[self._num_seen :]
        self._num_seen += len(new)
        if not self._parser.is_reasoning:
            return self._count
        texts = [self._tokenizer.token_text(token_id) for token_id in new]
        self._undecided += map(len, texts)
        self._parser.feed("".join(texts))
        if output.finish_reason is not None:
            self._parser.finish()
        num_counted = 0
        while num_counted < len(self._undecided) and self._num_characters < self._parser.reasoning_length:
            self._num_characters += self._undecided[num_counted]
            num_counted += 1
        del self._undecided[:num_counted]
        self._count += num_counted
        return self._count


def _is_open(
    parser: type[ReasoningParser], request: ChatCompletionRequest, conversation: str, template_kwargs: Mapping[str, Any]
) -> bool:
    """Whether the output begins with reasoning. The template may already have opened the reasoning, or closed it."""
    begun = _begun_message(request)
    if begun.strip():
        return begun.rfind(parser.opening) > begun.rfind(parser.closing)
    end = conversation.rstrip()
    if end.endswith((parser.opening, parser.closing)):
        return end.endswith(parser.opening)
    return parser.switch is None or template_kwargs.get(parser.switch) is not False


def _begun_message(request: ChatCompletionRequest) -> str:
    """The text of the message that the model continues; empty if the model begins a new message."""
    last = request.messages[-1]
    return content_text(last.role, last.content) if request.continue_final_message else ""
