"""Tool calls in chat: what a request asks for, and a model's text as a message with calls.

Where a function has to be called, the prompt ends with the beginning of the call. If that is one certain function,
what the model writes are its arguments; if it is any of several, the model writes the name, too. It is then held to a
grammar: to the names that there are, and to JSON that follows the function's schema, or, where calls are tags, to its
parameters and the JSON in them. Of a function that isn't `strict`, keywords that the grammar can't express are passed
over. Only running out of tokens cuts it short. Where it thinks before it calls, its thought is free, and the grammar
has the beginning of the call, too.

A model that may call functions, but needn't, is held to their schemas if any of them is `strict` and a mark announces
every call, as with Hermes. If the request also says what content has to be, a message is either such calls or that,
strict or not; where a call has to be made, that wins. Everywhere else, and where a function's names can't stand in
tags, nothing constrains it: arguments can be invalid, and if it was to call any of several and doesn't, the request
fails with code `tool_not_called`.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raycore.errors import InvalidRequest
from raycore.grammar.compiler import WHITE_SPACE
from raycore.grammar.lark import alternative
from raycore.server.constraints import close_thought, named
from raycore.server.errors import APIError
from raycore.server.options import ServerOptions
from raycore.server.parsers.tags import any_special
from raycore.server.parsers.tool_calls import (
    PARSERS,
    CallArguments,
    CallStart,
    Content,
    Delta,
    Schemas,
    ToolParser,
    parser_named,
)
from raycore.server.protocol import ChatCompletionRequest, NamedTool
from raycore.structured_outputs import StructuredOutputsParams
from raycore.text.tokenizer import Tokenizer

_SHOWN = 200
"""Characters of a model's text in an error."""


@dataclass(frozen=True)
class ToolUse:
    """How one request may call tools."""

    parser: type[ToolParser]
    schemas: Schemas
    function: str | None
    """The one that has to be called."""
    must_call: bool
    """Whether any of them has to be."""
    only_first: bool
    """Whether calls after the first are left out."""
    strict: frozenset[str]
    """The functions whose schemas have to be followed to the letter."""
    is_prefilled: bool
    """Whether the prompt ends with the beginning of a call."""

    @staticmethod
    def of(request: ChatCompletionRequest, tokenizer: Tokenizer, options: ServerOptions) -> ToolUse | None:
        """None when the request has no tools to call.

        Raises:
            APIError: what it asks of its tools can't be had; the error says which and why.
        """
        choice = request.tool_choice
        must_call = choice == "required" or isinstance(choice, NamedTool)
        if not request.tools or choice == "none":
            if must_call:
                raise APIError(400, "tool_choice needs tools to choose from", param="tool_choice")
            return None
        schemas = {tool.function.name: tool.function.parameters or {} for tool in request.tools}
        parser = _find_parser(tokenizer, request.chat_template or options.chat_template, options.tool_call_parser)
        function = choice.function.name if isinstance(choice, NamedTool) else None
        if function is not None and function not in schemas:
            known = ", ".join(schemas)
            raise APIError(400, f"tool_choice names {function!r}, but tools are: {known}", param="tool_choice")
        if must_call and (request.continue_final_message or not request.add_generation_prompt):
            raise APIError(400, "tool_choice can't force a call unless a message begins", param="tool_choice")
        if must_call and len(schemas) == 1:
            (function,) = schemas
        only_first = request.parallel_tool_calls is False or isinstance(choice, NamedTool)
        strict = frozenset(tool.function.name for tool in request.tools if tool.function.strict)
        return ToolUse(parser, schemas, function, must_call, only_first, strict, is_prefilled=must_call)

    def begin_message(self, prompt: str) -> str:
        """The prompt, with the beginning of a call where there has to be one."""
        if not self.is_prefilled:
            return prompt
        return close_thought(prompt) + self.parser.prefill(self.function)

    def lets_think(self) -> bool:
        """Whether the model may think first: it can then be made to call by a grammar alone."""
        return not self.must_call or self.parser.has_grammar(self.schemas)

    def behind_thought(self) -> ToolUse:
        """The same where the model thinks first."""
        return replace(self, is_prefilled=False)

    def constraint(
        self, tokenizer: Tokenizer, content: StructuredOutputsParams | None, param: str
    ) -> StructuredOutputsParams | None:
        """What holds the model's text to the tools; None where nothing does.

        Args:
            content: what a message without calls has to be; None leaves it free.
            param: the request's field that is to blame where it can't be done.

        Raises:
            APIError: the tools are too large for it, or `content` can't be held to beside them.
        """
        try:
            grammar = self._grammar(tokenizer, content)
            return None if grammar is None else StructuredOutputsParams(grammar=grammar)
        except InvalidRequest as error:
            raise named(error, param) from error

    def _grammar(self, tokenizer: Tokenizer, content: StructuredOutputsParams | None) -> str | None:
        other = None if content is None or self.must_call else alternative(content)
        if not self.parser.has_grammar(self.schemas):
            if other is None:
                return None
            raise InvalidRequest(
                "together with tools that may be called it needs calls that a grammar can say, and names of these "
                "tools or their parameters can't stand in the tags of this model's calls: send tool_choice='none'"
            )
        schemas = {name: _compiled_as(schema, name in self.strict) for name, schema in self.schemas.items()}
        special = self._special_marks(tokenizer)
        if self.must_call:
            return self.parser.calls_grammar(
                schemas, self.function, special, only_first=self.only_first, is_prefilled=self.is_prefilled
            )
        if other is not None:
            return self.parser.calls_or_grammar(schemas, other, special, only_first=self.only_first)
        return self.parser.message_grammar(schemas, special) if self.strict else None

    def _special_marks(self, tokenizer: Tokenizer) -> dict[str, int]:
        marks = (self.parser.opening, self.parser.closing)
        spelled = {text: tokenizer.encode(text, add_special_tokens=False) for text in marks}
        return {text: ids[0] for text, ids in spelled.items() if len(ids) == 1 and ids[0] in tokenizer.special_ids}

    def needs_special_tokens(self, tokenizer: Tokenizer) -> bool:
        """Whether the model marks calls by tokens that are left out of the text otherwise."""
        return any_special(tokenizer, self.parser.opening, self.parser.closing)


class MessageReader:
    """Turns the text of one message, while it comes, into what clients are told."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._parser = use.parser(use.schemas)
        self._num_calls = 0
        self._pending: list[Delta] = []
        if not use.is_prefilled:
            return
        if use.function is not None:
            self._pending = self._parser.begin(use.function)
        else:
            self._pending = self._parser.feed(use.parser.prefill(None))

    def read(self, text: str, finish_reason: str | None) -> list[dict[str, Any]]:
        """What is new, as values of a streamed choice's `delta`, once more text has come.

        Raises:
            APIError: a function had to be called, and none was.
        """
        deltas = [*self._pending, *self._parser.feed(text), *(self._parser.finish() if finish_reason else [])]
        self._pending = []
        content = "".join(delta.text for delta in deltas if isinstance(delta, Content))
        if self._use.must_call and not self._num_calls and content and isinstance(deltas[0], Content):
            raise _not_called(f"it wrote {content.removeprefix(self._use.parser.prefill(None))[:_SHOWN]!r}")
        calls = self._calls([delta for delta in deltas if not isinstance(delta, Content)])
        return [*([{"content": content}] if content else []), *([{"tool_calls": calls}] if calls else [])]

    def message(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        """`content` and, where there are any, `tool_calls` of a message that is complete."""
        told = {name: value for delta in self.read(text, finish_reason) for name, value in delta.items()}
        calls: list[dict[str, Any]] = told.get("tool_calls", [])
        for call in calls:
            del call["index"]
        content = {"content": told.get("content", None if calls else "")}
        return content | {"tool_calls": calls} if calls else content

    def finish_reason(self, reason: str | None) -> str | None:
        """A message that ended by itself and called tools ended for that."""
        return "tool_calls" if reason == "stop" and self._num_calls else reason

    def _calls(self, deltas: Sequence[CallStart | CallArguments]) -> list[dict[str, Any]]:
        calls: dict[int, dict[str, Any]] = {}
        for delta in deltas:
            if self._use.only_first and delta.index:
                continue
            if isinstance(delta, CallStart):
                if self._use.must_call and not self._num_calls and delta.name not in self._use.schemas:
                    raise _not_called(f"it called {delta.name!r}")
                self._num_calls += 1
                function = {"name": delta.name, "arguments": ""}
                call_id = f"call_{uuid.uuid4().hex[:24]}"
                calls[delta.index] = {"index": delta.index, "id": call_id, "type": "function", "function": function}
            else:
                call = calls.setdefault(delta.index, {"index": delta.index, "function": {"arguments": ""}})
                call["function"]["arguments"] += delta.text
        return list(calls.values())


def _compiled_as(schema: Mapping[str, Any], is_strict: bool) -> dict[str, Any]:
    """The schema with what llguidance is told by it: whether keywords that it doesn't know may be passed over."""
    return {**schema, "x-guidance": {**WHITE_SPACE, "lenient": not is_strict}}


def _not_called(why: str) -> APIError:
    return APIError(
        500,
        f"tool_choice wants one of tools to be called, but the model didn't do that: {why}. "
        "Try again, with more tokens, or name the function in tool_choice.",
        param="tool_choice",
        code="tool_not_called",
        kind="server_error",
    )


def _find_parser(tokenizer: Tokenizer, chat_template: str | None, asked: str | None) -> type[ToolParser]:
    shows_tools, found = _look_at_template(tokenizer, chat_template)
    if not shows_tools:
        raise APIError(400, "tools: the model's chat template shows it no tools, so it can't call any", param="tools")
    parser = found if asked is None else parser_named(asked)
    if parser is None:
        raise APIError(
            400,
            "tools: how the model writes tool calls wasn't recognized from its chat template; start the server with "
            f"--tool-call-parser ({', '.join(PARSERS)}), or send tool_choice='none'",
            param="tools",
        )
    return parser


_PROBE = "raycore_probe"
_PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": _PROBE,
        "description": "Probes.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string", "description": "A key."}}},
    },
}
_PROBE_ASKED = {"role": "user", "content": "Probe."}
_PROBE_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "probe0000", "type": "function", "function": {"name": _PROBE, "arguments": {"key": "value"}}}
    ],
}


@functools.lru_cache(maxsize=8)
def _look_at_template(tokenizer: Tokenizer, chat_template: str | None) -> tuple[bool, type[ToolParser] | None]:
    """Whether a chat template shows tools to the model, and the parser that finds the calls which it writes."""
    asked = _try_rendering(tokenizer, chat_template, [_PROBE_ASKED], add_generation_prompt=True)
    if asked is None or _PROBE not in asked:
        return False, None
    called = _try_rendering(tokenizer, chat_template, [_PROBE_ASKED, _PROBE_CALL], add_generation_prompt=False)
    for parser in PARSERS.values():
        reader = parser({})
        deltas = [*reader.feed((called or "").removeprefix(asked)), *reader.finish()]
        if any(isinstance(delta, CallStart) and delta.name == _PROBE for delta in deltas):
            return True, parser
    return True, None


def _try_rendering(
    tokenizer: Tokenizer, chat_template: str | None, messages: list[dict[str, Any]], *, add_generation_prompt: bool
) -> str | None:
    try:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, chat_template=chat_template, tools=[_PROBE_TOOL]
        )
    except InvalidRequest:
        return None
