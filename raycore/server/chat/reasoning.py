"""What a model thinks in one chat request, on a server that tells it from what the model says.

Where the prompt doesn't say otherwise the output begins with a thought, as in vLLM. A constraint of the output is one
of what is said: the model thinks freely before. It doesn't think before a call that it has to make, where only its
prompt can make it call.
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
from raycore.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Thinking:
    """How one request's thoughts are written and told."""

    parser: type[ReasoningParser]
    is_first: bool
    """Whether the output begins with a thought."""
    is_told: bool
    """Whether the client wants it."""
    call: str | None
    """Announces a call to the tools that the request has."""

    @staticmethod
    def of(
        request: ChatCompletionRequest,
        prompt: str,
        template_kwargs: Mapping[str, Any],
        tools: ToolUse | None,
        options: ServerOptions,
    ) -> Thinking | None:
        """None where the server doesn't tell thoughts from the rest. `prompt` is the rendered conversation."""
        if options.reasoning_parser is None:
            return None
        parser = parser_named(options.reasoning_parser)
        is_first = _is_open(parser, request, prompt, template_kwargs)
        if tools is None:
            return Thinking(parser, is_first, request.include_reasoning, None)
        return Thinking(parser, is_first and tools.lets_think(), request.include_reasoning, tools.parser.opening)

    def reader(self) -> ReasoningParser:
        """Reads one of the request's messages."""
        return self.parser(self.is_first, self.call)

    def counter(self, tokenizer: Tokenizer) -> ThoughtCounter:
        """Counts the tokens of one message's thought."""
        return ThoughtCounter(self.reader(), tokenizer)

    def postpone(self, constraint: StructuredOutputsParams | None) -> StructuredOutputsParams | None:
        """The same constraint of what is said alone."""
        if constraint is None or not self.is_first:
            return constraint
        call = self.call if self.parser.calls_end_thoughts else None
        return msgspec.structs.replace(constraint, after=self.parser.closing, or_from=call)

    def needs_special_tokens(self, tokenizer: Tokenizer) -> bool:
        """Whether the model marks thoughts by tokens that are left out of the text otherwise."""
        return any_special(tokenizer, self.parser.opening, self.parser.closing)


class ThoughtCounter:
    """Counts the tokens of one message's thought, its tags among them."""

    def __init__(self, parser: ReasoningParser, tokenizer: Tokenizer) -> None:
        self._parser = parser
        self._tokenizer = tokenizer
        self._num_seen = 0
        self._count = 0
        self._num_characters = 0
        """Of the tokens counted."""
        self._undecided: list[int] = []
        """Characters of each of the tokens that may belong to the thought or not."""

    def count(self, output: CompletionOutput) -> int:
        """How many of all tokens so far are known to belong to the thought."""
        new = output.token_ids[self._num_seen :]
        self._num_seen += len(new)
        if not self._parser.is_thinking:
            return self._count
        texts = [self._tokenizer.token_text(token_id) for token_id in new]
        self._undecided += map(len, texts)
        self._parser.feed("".join(texts))
        if output.finish_reason is not None:
            self._parser.finish()
        num_counted = 0
        while num_counted < len(self._undecided) and self._num_characters < self._parser.thought_length:
            self._num_characters += self._undecided[num_counted]
            num_counted += 1
        del self._undecided[:num_counted]
        self._count += num_counted
        return self._count


def _is_open(
    parser: type[ReasoningParser], request: ChatCompletionRequest, prompt: str, template_kwargs: Mapping[str, Any]
) -> bool:
    """Whether what follows the prompt is thought: a template may have opened a thought, or closed one."""
    begun = _begun_message(request)
    if begun.strip():
        return begun.rfind(parser.opening) > begun.rfind(parser.closing)
    end = prompt.rstrip()
    if end.endswith((parser.opening, parser.closing)):
        return end.endswith(parser.opening)
    return parser.switch is None or template_kwargs.get(parser.switch) is not False


def _begun_message(request: ChatCompletionRequest) -> str:
    """What the client has the model go on with; empty if that is a message of its own."""
    content = request.messages[-1].content if request.continue_final_message else None
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(str(part.get("text", "")) for part in content)
