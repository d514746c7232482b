"""A model's reasoning in one chat request, on a server with a reasoning parser.

As in vLLM, the output begins with reasoning unless the prompt says otherwise. A constraint applies to the content, so
the reasoning is unconstrained. There is no reasoning before a required call that no grammar can express: only the end
of the prompt can make the model write it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from raycore.outputs import CompletionOutput
from raycore.server.chat.tools import ToolUse
from raycore.server.options import ServerOptions
from raycore.server.parsers.reasoning import ReasoningParser, parser_named
from raycore.server.parsers.tags import any_special
from raycore.server.protocol import ChatCompletionRequest
from raycore.structured_outputs import StructuredOutputsParams
from raycore.text.conversation import content_text
from raycore.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Reasoning:
    """How the reasoning of one request's messages is written and reported."""

    parser: type[ReasoningParser]
    is_first: bool
    """Whether the output begins with reasoning."""
    is_included: bool
    """Whether the answer includes it."""
    call: str | None
    """The tag that opens a call, if the request has tools."""

    @staticmethod
    def of(
        request: ChatCompletionRequest,
        conversation: str,
        template_kwargs: Mapping[str, Any],
        tools: ToolUse | None,
        options: ServerOptions,
    ) -> Reasoning | None:
        """None without a reasoning parser. `conversation` is the rendered text."""
        if options.reasoning_parser is None:
            return None
        parser = parser_named(options.reasoning_parser)
        is_first = _is_open(parser, request, conversation, template_kwargs)
        if tools is None:
            return Reasoning(parser, is_first, request.include_reasoning, None)
        return Reasoning(parser, is_first and tools.allows_reasoning(), request.include_reasoning, tools.parser.opening)

    def reader(self) -> ReasoningParser:
        """A parser for one of the request's messages."""
        return self.parser(self.is_first, self.call)

    def counter(self, tokenizer: Tokenizer) -> ReasoningCounter:
        """A counter of one message's reasoning tokens."""
        return ReasoningCounter(self.reader(), tokenizer)

    def postpone(self, constraint: StructuredOutputsParams | None) -> StructuredOutputsParams | None:
        """The same constraint on what follows the reasoning."""
        if constraint is None or not self.is_first:
            return constraint
        call = self.call if self.parser.calls_end_reasoning else None
        return msgspec.structs.replace(constraint, after=self.parser.closing, or_from=call)

    def needs_special_tokens(self, tokenizer: Tokenizer) -> bool:
        """Whether the tags are special tokens, which the output's text leaves out by default."""
        return any_special(tokenizer, self.parser.opening, self.parser.closing)


class ReasoningCounter:
    """Counts the tokens of one message's reasoning, tags included."""

    def __init__(self, parser: ReasoningParser, tokenizer: Tokenizer) -> None:
        self._parser = parser
        self._tokenizer = tokenizer
        self._num_seen = 0
        self._count = 0
        self._num_characters = 0
        """Characters of the counted tokens."""
        self._undecided: list[int] = []
        """Characters of each token that may or may not belong to the reasoning."""

    def count(self, output: CompletionOutput) -> int:
        """Tokens of the output so far that certainly belong to the reasoning."""
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
    """Whether reasoning follows the conversation. The template may have opened it, or closed it."""
    begun = _begun_message(request)
    if begun.strip():
        return begun.rfind(parser.opening) > begun.rfind(parser.closing)
    end = conversation.rstrip()
    if end.endswith((parser.opening, parser.closing)):
        return end.endswith(parser.opening)
    return parser.switch is None or template_kwargs.get(parser.switch) is not False


def _begun_message(request: ChatCompletionRequest) -> str:
    """The message that the model continues; empty if it begins one."""
    last = request.messages[-1]
    return content_text(last.role, last.content) if request.continue_final_message else ""
