"""Tool calls in chat: how a request may use its tools, and how a model's text becomes a message with tool calls.

If a call is required, the prompt ends with the beginning of the call. The model then writes the rest: the function's
name, if several functions are possible, and the arguments. A grammar forces the model to choose one of the tools and to
follow the schema of the function's parameters. So only a message that was cut off can lack the call. If the model
reasons first, the prompt doesn't begin the call: the reasoning is unconstrained, and the grammar applies to the text
after the reasoning, including the beginning of the call. A required call overrides a constraint on the content.

If calls are optional, the grammar is used only if a function is `strict` and the format has a tag before every call, as
in Hermes. If the request also constrains the content, the grammar is always used: the message is then either calls that
follow the grammar, or content that follows its constraint.

In all other cases, and if the format can't write a function's or parameter's name in a tag, the output is
unconstrained: arguments can be invalid, and a request whose required call isn't made fails with code `tool_not_called`.

Keywords of JSON Schema that the grammar doesn't support are ignored, except for functions that are `strict`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from raycore.errors import InvalidRequest
from raycore.parts.constraints.grammar.lark import WHITE_SPACE, alternative
from raycore.parts.constraints.server import named
from raycore.server.chat.call_format import find_parser
from raycore.server.chat.parts import CallBegin, Part
from raycore.server.http.errors import APIError
from raycore.server.options import ServerOptions
from raycore.server.parsers.tags import any_special
from raycore.server.parsers.tool_calls import (
    CallArguments,
    Content,
    Delta,
    Schemas,
    ToolParser,
    function_schema,
)
from raycore.server.protocol import ChatCompletionRequest, NamedTool, Tool
from raycore.structured_outputs import StructuredOutputsParams
from raycore.text.tokenizer import Tokenizer

_SHOWN = 200
"""How many characters of a model's text an error shows."""


class TextEnd(Enum):
    """How the text of a choice has ended."""

    COMPLETE = "complete"
    """The model ended the text."""
    CUT_OFF = "cut off"
    """The text was cut off: without that, the model would have gone on."""


@dataclass(frozen=True)
class ToolUse:
    """How one request may call tools."""

    parser: type[ToolParser]
    schemas: Schemas
    function: str | None
    """The function that a required call must name; None: any of the tools."""
    must_call: bool
    """Whether a call is required."""
    only_first: bool
    """Whether calls after the first one are dropped."""
    strict: frozenset[str]
    """The functions whose schemas must be followed exactly."""

    @staticmethod
    def of(request: ChatCompletionRequest, tokenizer: Tokenizer, options: ServerOptions) -> ToolUse | None:
        """How a request may call tools; None if it has no tools or forbids calls.

        Raises:
            APIError: `tools` or `tool_choice` can't be satisfied; the error says why.
        """
        choice = request.tool_choice
        must_call = choice == "required" or isinstance(choice, NamedTool)
        if not request.tools or choice == "none":
            if must_call:
                raise APIError(400, "tool_choice requires a call, but there are no tools", param="tool_choice")
            return None
        schemas = _function_schemas(request.tools)
        parser = find_parser(tokenizer, request.chat_template or options.chat_template, options.tool_call_parser)
        function = choice.function.name if isinstance(choice, NamedTool) else None
        if function is not None and function not in schemas:
            known = ", ".join(schemas)
            message = f"tool_choice names {function!r}, which isn't one of tools: {known}"
            raise APIError(400, message, param="tool_choice")
        if must_call and (request.continue_final_message or not request.add_generation_prompt):
            raise APIError(
                400,
                "tool_choice can't require a call in a message that is continued: a required call needs "
                "add_generation_prompt=true and continue_final_message=false",
                param="tool_choice",
            )
        if must_call and len(schemas) == 1:
            (function,) = schemas
        only_first = request.parallel_tool_calls is False or isinstance(choice, NamedTool)
        strict = frozenset(tool.function.name for tool in request.tools if tool.function.strict)
        return ToolUse(parser, schemas, function, must_call, only_first, strict)

    def prefill(self) -> str:
        """The beginning of a required call, as text to append to the prompt."""
        return self.parser.prefill(self.function)

    def allows_reasoning(self) -> bool:
        """Whether the model may reason before a call. It may not if a call is required that no grammar can enforce."""
        return not self.must_call or self.parser.has_grammar(self.schemas)

    def constraint(
        self, tokenizer: Tokenizer, content: StructuredOutputsParams | None, *, is_prefilled: bool, param: str
    ) -> StructuredOutputsParams | None:
        """The constraint on a message that may have calls; None: the message is unconstrained.

        Args:
            content: the constraint on the content of a message without calls; None: such content is unconstrained.
            is_prefilled: whether the prompt ends with `prefill()`.
            param: the request's field that errors name.

        Raises:
            APIError: the tools are too large for a constraint, or can't be combined with `content`.
        """
        try:
            grammar = self._grammar(tokenizer, content, is_prefilled)
            return None if grammar is None else StructuredOutputsParams(grammar=grammar)
        except InvalidRequest as error:
            raise named(error, param) from error

    def _grammar(self, tokenizer: Tokenizer, content: StructuredOutputsParams | None, is_prefilled: bool) -> str | None:
        other = None if content is None or self.must_call else alternative(content)
        if not self.parser.has_grammar(self.schemas):
            if other is None:
                return None
            raise InvalidRequest(
                "a constraint can't be combined with these tools: the name of a tool or parameter can't be written in "
                "the tags of this model's calls; rename the tool or parameter, or send tool_choice='none'"
            )
        schemas = {name: _compiled_as(schema, name in self.strict) for name, schema in self.schemas.items()}
        special = self._special_tags(tokenizer)
        if self.must_call:
            return self.parser.calls_grammar(
                schemas, self.function, special, only_first=self.only_first, is_prefilled=is_prefilled
            )
        if other is not None:
            return self.parser.calls_or_grammar(schemas, other, special, only_first=self.only_first)
        return self.parser.message_grammar(schemas, special) if self.strict else None

    def _special_tags(self, tokenizer: Tokenizer) -> dict[str, int]:
        encoded = {tag: tokenizer.encode(tag, add_special_tokens=False) for tag in self.parser.tags()}
        return {tag: ids[0] for tag, ids in encoded.items() if len(ids) == 1 and ids[0] in tokenizer.special_ids}

    def needs_special_tokens(self, tokenizer: Tokenizer) -> bool:
        """Whether the tags are special tokens, which the output's text leaves out by default."""
        return any_special(tokenizer, *self.parser.tags())


class MessageReader:
    """Turns the text of one choice, without its reasoning, into content and tool calls, while the text arrives."""

    def __init__(self, use: ToolUse, *, is_prefilled: bool) -> None:
        """`is_prefilled`: whether the prompt ends with `use.prefill()`, so that the text begins inside a call."""
        self._use = use
        self._parser = use.parser(use.schemas)
        self._num_calls = 0
        self._pending: list[Delta] = []
        self._num_prefilled = 0
        """Number of characters that the parser has read and that are the prompt's."""
        if is_prefilled and use.function is not None:
            self._pending = self._parser.begin(use.function)
        elif is_prefilled:
            self._pending = self._parser.feed(use.prefill())
            self._num_prefilled = len(use.prefill())

    def read(self, text: str, end: TextEnd | None) -> list[Part]:
        """Take the next piece of text, or the whole one. Returns the parts that are certain now.

        `end`: None if more text follows.

        Raises:
            APIError: the model wrote something else instead of a required call.
        """
        deltas = [*self._pending, *self._parser.feed(text)]
        if end is not None:
            deltas += self._parser.finish(end is TextEnd.CUT_OFF)
        self._pending = []
        return [part for delta in _merged(deltas) if (part := self._part(delta)) is not None]

    def finish_reason(self, reason: str | None) -> str | None:
        """The finish reason for the client: `tool_calls` instead of `stop` if the message has calls."""
        return "tool_calls" if reason == "stop" and self._num_calls else reason

    def _part(self, delta: Delta) -> Part | None:
        """What the message gets for a delta of the parser; None: nothing."""
        if isinstance(delta, Content):
            if self._use.must_call and not self._num_calls:
                return self._before_call(delta.text)
            return delta if delta.start is None else Content(delta.text, delta.start - self._num_prefilled)
        if self._use.only_first and delta.index:
            return None
        if isinstance(delta, CallArguments):
            return delta
        if self._use.must_call and not self._num_calls and delta.name not in self._use.schemas:
            raise _not_called(f"it called {delta.name!r}, which isn't one of them")
        self._num_calls += 1
        return CallBegin(delta.index, self._use.parser.call_id(), delta.name)

    def _before_call(self, text: str) -> None:
        """Drop white space before a required call."""
        if text.strip():
            raise _not_called(f"it wrote {text.removeprefix(self._use.parser.prefill(None))[:_SHOWN]!r}")


def _merged(deltas: Sequence[Delta]) -> list[Delta]:
    """The deltas, in which each run of content that stands together, or of one call's arguments, is one."""
    merged: list[Delta] = []
    for delta in deltas:
        last = merged[-1] if merged else None
        if isinstance(delta, Content) and isinstance(last, Content) and _end(last) == delta.start:
            merged[-1] = Content(last.text + delta.text, last.start)
        elif isinstance(delta, CallArguments) and isinstance(last, CallArguments) and delta.index == last.index:
            merged[-1] = CallArguments(delta.index, last.text + delta.text)
        else:
            merged.append(delta)
    return merged


def _end(content: Content) -> int | None:
    return None if content.start is None else content.start + len(content.text)


def _function_schemas(tools: Sequence[Tool]) -> dict[str, dict[str, Any]]:
    try:
        return {
            each.name: function_schema(each.name, each.parameters, each.model_extra or {})
            for each in (tool.function for tool in tools)
        }
    except InvalidRequest as error:
        raise named(error, "tools") from error


def _compiled_as(schema: Mapping[str, Any], is_strict: bool) -> dict[str, Any]:
    """The schema with options for llguidance. Without `is_strict`, llguidance ignores keywords it doesn't support."""
    return {**schema, "x-guidance": {**WHITE_SPACE, "lenient": not is_strict}}


def _not_called(why: str) -> APIError:
    return APIError(
        500,
        f"tool_choice requires a call of one of tools, but the model didn't comply: {why}. "
        "Try again, or name the function in tool_choice.",
        param="tool_choice",
        code="tool_not_called",
        kind="server_error",
    )
