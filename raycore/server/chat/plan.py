"""Plans the answer to a chat request: how the prompt ends, how the output is constrained, and how it is read. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from raycore.parts.constraints.server import close_reasoning, constraint_param
from raycore.sampling_params import SamplingParams
from raycore.server.chat.choice_reader import ChoiceReader
from raycore.server.chat.reasoning import Reasoning
from raycore.server.chat.tools import MessageReader, ToolUse
from raycore.server.options import ServerOptions
from raycore.server.protocol import ChatCompletionRequest
from raycore.structured_outputs import StructuredOutputsParams
from raycore.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class MessagePlan:
    """Which parts the answers to one request may have (reasoning, then content or tool calls), and in which form."""

    tools: ToolUse | None
    """How tools may be called; None: no tool calls."""
    reasoning: Reasoning | None
    """How reasoning is handled; None: it is not separated from the content."""
    content: StructuredOutputsParams | None
    """The constraint on the content; None: the content is unconstrained."""
    content_param: str
    """The request's field that sets the constraint on the content."""

    @staticmethod
    def of(
        request: ChatCompletionRequest,
        conversation: str,
        template_kwargs: Mapping[str, Any],
        content: StructuredOutputsParams | None,
        tokenizer: Tokenizer,
        options: ServerOptions,
    ) -> MessagePlan:
        """The plan for the answers to a request.

        Args:
            conversation: the text of the conversation, rendered by the chat template.
            content: the constraint on the content.

        Raises:
            APIError: the request's tools can't be used.
        """
        tools = ToolUse.of(request, tokenizer, options)
        reasoning = Reasoning.of(request, conversation, template_kwargs, tools, options)
        return MessagePlan(tools, reasoning, content, constraint_param(request))

    def prompt(self, conversation: str) -> str:
        """The prompt: the conversation and, if necessary, the beginning of the answer, such as that of a tool call."""
        if self.tools is not None and self._is_call_prefilled:
            return close_reasoning(conversation) + self.tools.prefill()
        if self.content is not None and self.reasoning is None:
            return close_reasoning(conversation)
        return conversation

    def constraint(self, tokenizer: Tokenizer) -> StructuredOutputsParams | None:
        """The constraint on the whole output; None if it is unconstrained.

        Raises:
            APIError: the tools are too large for a constraint, or can't be combined with the constraint on the content.
        """
        constraint = self.content
        if self.tools is not None:
            constraint = self.tools.constraint(
                tokenizer, self.content, is_prefilled=self._is_call_prefilled, param=self.constraint_param
            )
        return constraint if self.reasoning is None else self.reasoning.postpone(constraint)

    def params(self, asked: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
        """The sampling parameters of the request, with what the parts of the answer need.

        Raises:
            APIError: as `constraint` does.
        """
        is_unlimited = asked.thinking_token_budget is None
        stop_after, stop_or_from = (None, None) if self.reasoning is None else self.reasoning.ends
        return msgspec.structs.replace(
            asked,
            structured_outputs=self.constraint(tokenizer),
            skip_special_tokens=asked.skip_special_tokens and not self.needs_special_tokens(tokenizer),
            stop_after=stop_after,
            stop_or_from=stop_or_from,
            reasoning_tags=None if self.reasoning is None or is_unlimited else self.reasoning.tags,
        )

    @property
    def constraint_param(self) -> str:
        """The request's field that caused the constraint on the output. Errors name this field."""
        if self.tools is not None and (self.content is None or self.tools.must_call):
            return "tools"
        return self.content_param

    def needs_special_tokens(self, tokenizer: Tokenizer) -> bool:
        """Whether the output's text has to include special tokens, because the tags are special tokens."""
        parts = (self.tools, self.reasoning)
        return any(part is not None and part.needs_special_tokens(tokenizer) for part in parts)

    def reader(self) -> ChoiceReader:
        """A new reader for one of the request's choices."""
        calls = None if self.tools is None else MessageReader(self.tools, is_prefilled=self._is_call_prefilled)
        return ChoiceReader(self.reasoning, calls)

    @property
    def _is_call_prefilled(self) -> bool:
        """Whether the prompt ends with the beginning of a tool call."""
        begins_with_reasoning = self.reasoning is not None and self.reasoning.is_first
        return self.tools is not None and self.tools.must_call and not begins_with_reasoning
