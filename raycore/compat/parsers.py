"""Parsers of tool calls and reasoning that users write for vLLM, registered as raycore's.

Importing a plugin's file registers its classes. A class with vLLM's interface reads a whole message: its tool calls
come at the message's end, also in streams.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn, cast

from raycore.errors import InvalidConfig, InvalidRequest
from raycore.parts.constraints.grammar.lark import SpecialTokens
from raycore.plugins import REASONING_PARSERS, TOOL_PARSERS, register_plugin
from raycore.server.parsers import reasoning, tool_calls
from raycore.server.parsers.tool_calls import CallArguments, CallStart, Content, Delta, Schemas
from raycore.text.hf_tokenizer import HfTokenizer
from raycore.text.tokenizer import Tokenizer


@dataclass
class FunctionCall:
    """A function's name, and its arguments as JSON."""

    name: str
    arguments: str
    id: str | None = None


@dataclass
class ToolCall:
    """A call of a function."""

    function: FunctionCall
    id: str = field(default_factory=lambda: f"chatcmpl-tool-{uuid.uuid4().hex}")
    type: str = "function"


@dataclass
class DeltaFunctionCall:
    """A part of a function's call."""

    name: str | None = None
    arguments: str | None = None


@dataclass
class DeltaToolCall:
    """A part of a call."""

    index: int
    function: DeltaFunctionCall | None = None
    id: str | None = None
    type: str | None = None


@dataclass
class DeltaMessage:
    """A part of a message."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[DeltaToolCall] = field(default_factory=list[DeltaToolCall])


@dataclass
class ExtractedToolCallInformation:
    """What a parser finds in a message."""

    tools_called: bool
    tool_calls: list[ToolCall]
    content: str | None = None


class _Parser:
    """What parsers with vLLM's interface know."""

    def __init__(self, tokenizer: HfTokenizer) -> None:
        self.model_tokenizer = tokenizer

    @cached_property
    def vocab(self) -> dict[str, int]:
        """All tokens with their ids."""
        return self.model_tokenizer.get_vocab()


class ToolParser(_Parser):
    """Base of parsers of tool calls, with vLLM's interface. raycore calls `extract_tool_calls`, and nothing else."""

    supports_required_and_named: ClassVar[bool] = True

    def __init__(self, tokenizer: HfTokenizer, tools: Sequence[Any] | None = None) -> None:
        super().__init__(tokenizer)
        self.tools = list(tools or ())
        self.prev_tool_call_arr: list[dict[str, Any]] = []
        self.current_tool_id = -1
        self.current_tool_name_sent = False
        self.streamed_args_for_tool: list[str] = []

    def adjust_request(self, request: Any) -> Any:
        """Not called: special tokens that are attributes of the parser are in the text."""
        return request

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        """Find the calls in a whole message. `request` has its `tools`."""
        raise NotImplementedError


class ReasoningParser(_Parser):
    """Base of parsers of reasoning, with vLLM's interface. raycore needs the tags of `BaseThinkingReasoningParser`."""


class BaseThinkingReasoningParser(ReasoningParser):
    """Base of parsers of reasoning between two tags. raycore reads these, and calls nothing."""

    @property
    def start_token(self) -> str:
        """The tag that opens the reasoning."""
        raise NotImplementedError

    @property
    def end_token(self) -> str:
        """The tag that closes the reasoning."""
        raise NotImplementedError


class _Manager:
    """Registers classes as parsers of one kind."""

    _group: ClassVar[str]

    @classmethod
    def register_module(
        cls, name: str | Sequence[str] | None = None, force: bool = True, module: type[Any] | None = None
    ) -> Any:
        """Register a class under a name, or several: its own without any. Without `module`, return a decorator.

        `force` has no effect: the last one of a name counts.
        """

        def register(parser: type[Any]) -> type[Any]:
            names = [name] if isinstance(name, str) else list(name or [parser.__name__])
            for each in names:
                register_plugin(cls._group, each, cls._adapted(parser))
            return parser

        return register if module is None else register(module)

    @classmethod
    def _adapted(cls, parser: type[Any]) -> type[Any]:
        raise NotImplementedError


class ToolParserManager(_Manager):
    """Registers parsers for `--tool-call-parser`: subclasses of `ToolParser`, or of raycore's class of this name."""

    _group = TOOL_PARSERS

    @classmethod
    def _adapted(cls, parser: type[Any]) -> type[tool_calls.ToolParser]:
        if issubclass(parser, tool_calls.ToolParser):
            return parser
        return type(parser.__name__, (_AdaptedToolParser,), {"theirs": parser})


class ReasoningParserManager(_Manager):
    """Registers parsers for `--reasoning-parser`: those of reasoning between tags, or subclasses of raycore's class."""

    _group = REASONING_PARSERS

    @classmethod
    def _adapted(cls, parser: type[Any]) -> type[reasoning.ReasoningParser]:
        if issubclass(parser, reasoning.ReasoningParser):
            return parser
        if not issubclass(parser, BaseThinkingReasoningParser):
            raise InvalidConfig(
                f"the reasoning parser {parser.__name__} isn't a BaseThinkingReasoningParser, whose tags raycore reads"
            )
        made = object.__new__(parser)  # the constructor needs a tokenizer
        tags = {"opening": made.start_token, "closing": made.end_token}
        return type(parser.__name__, (reasoning.ReasoningParser,), tags)


class _AdaptedToolParser(tool_calls.ToolParser):
    """Reads a message with a parser that has vLLM's interface."""

    opening = closing = ""
    needs_opening = False
    theirs: ClassVar[Callable[..., ToolParser]]
    tokenizer: ClassVar[HfTokenizer]

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._text = ""

    @classmethod
    def for_tokenizer(cls, tokenizer: Tokenizer) -> type[tool_calls.ToolParser]:
        return cast("type[_AdaptedToolParser]", type(cls.__name__, (cls,), {"tokenizer": HfTokenizer.of(tokenizer)}))

    @classmethod
    def tags(cls) -> tuple[str, ...]:
        special = set(cls.tokenizer.all_special_tokens)
        held = vars(cls.theirs(cls.tokenizer)).values()
        return tuple(each for each in held if isinstance(each, str) and each in special)

    @classmethod
    def has_grammar(cls, schemas: Schemas) -> bool:
        return False

    @classmethod
    def prefill(cls, name: str | None) -> NoReturn:
        raise InvalidRequest(f"tool_choice can't require a call: the tool parser {cls.__name__} only reads calls")

    @classmethod
    def _call_rules(cls, schemas: Schemas, special: SpecialTokens) -> NoReturn:
        cls.prefill(None)

    def begin(self, name: str) -> NoReturn:
        self.prefill(name)

    def _in_head(self, is_last: bool) -> bool:
        return False

    def feed(self, text: str) -> list[Delta]:
        self._text += text
        return []

    def finish(self, is_cut_off: bool = False) -> list[Delta]:
        functions = [SimpleNamespace(name=name, parameters=dict(schema)) for name, schema in self._schemas.items()]
        tools = [SimpleNamespace(type="function", function=function) for function in functions]
        found = self.theirs(self.tokenizer).extract_tool_calls(self._text, SimpleNamespace(tools=tools))
        deltas: list[Delta] = []
        if found.content:
            deltas.append(Content(found.content, _place(found.content, self._text)))
        for index, call in enumerate(found.tool_calls if found.tools_called else ()):
            given: Any = call.function.arguments
            arguments = given if isinstance(given, str) else json.dumps(given)
            deltas += [CallStart(index, call.function.name), CallArguments(index, arguments)]
        return deltas


def _place(content: str, text: str) -> int | None:
    """Where `content` begins in `text`. None: it isn't there, or may be at several places, such as inside a call."""
    start = text.find(content)
    return start if start == 0 or start == text.rfind(content) >= 0 else None
