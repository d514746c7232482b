"""The parser for calls in Harmony, the format of gpt-oss."""

from __future__ import annotations

import json

from raycore.parts.constraints.grammar.lark import SpecialTokens, tag_rule
from raycore.server.parsers.harmony import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    ENDS,
    FUNCTIONS,
    MESSAGE,
    START,
    Body,
    HarmonyReader,
    Header,
    Joined,
)
from raycore.server.parsers.tool_calls.base import Content, Delta, ToolParser, is_name
from raycore.server.parsers.tool_calls.call_grammar import Schemas

_TO_FUNCTION = f"commentary to={FUNCTIONS}"


class HarmonyToolParser(ToolParser):
    """The format of gpt-oss: `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>`.

    Other messages are content, whatever their channel: a reasoning parser takes those that are reasoning. What follows
    a call is another message. Prompts and grammars of this class have one call.
    """

    opening = f"{CHANNEL}{_TO_FUNCTION}"
    closing = CALL

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._reader = HarmonyReader()
        self._function: str | None = None
        """The function that the message calls which is being read."""
        self._content = Joined()
        self._num_read = 0
        """Number of characters of the events so far."""

    @classmethod
    def tags(cls) -> tuple[str, ...]:
        return (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)

    @classmethod
    def prefill(cls, name: str | None) -> str:
        return cls.opening if name is None else f"{cls.opening}{name} {CONSTRAIN}json{MESSAGE}"

    @classmethod
    def has_grammar(cls, schemas: Schemas) -> bool:
        return not any(set(" <>\n") & set(name) for name in schemas)

    @classmethod
    def message_grammar(cls, schemas: Schemas, special: SpecialTokens) -> str | None:
        """None: texts may have special tokens, which no grammar allows in any text."""
        return None

    @classmethod
    def _opening_rule(cls, special: SpecialTokens) -> str:
        return f"{tag_rule(CHANNEL, special)} {json.dumps(_TO_FUNCTION)}"

    @classmethod
    def _more(cls, only_first: bool) -> str:
        """The tag that ends a call also ends the output."""
        return ""

    @classmethod
    def _call_rules(cls, schemas: Schemas, special: SpecialTokens) -> list[str]:
        before_json = f'{tag_rule(CONSTRAIN, special)} "json" {tag_rule(MESSAGE, special)}'
        rules: list[str] = []
        for index, (name, schema) in enumerate(schemas.items()):
            rules += [
                f"name_{index}: {json.dumps(f'{name} ')} {before_json}",
                f"rest_{index}: %json {json.dumps({'type': 'object', **schema})}",
            ]
        return rules

    def begin(self, name: str) -> list[Delta]:
        header = Header("", "commentary", FUNCTIONS + name)
        self._reader = HarmonyReader(header)
        self._begin_message(header)
        return self._run(is_last=False)

    def _run(self, is_last: bool) -> list[Delta]:
        text, self._buffer = self._buffer, ""
        for event in [*self._reader.feed(text), *(self._reader.finish() if is_last else ())]:
            if isinstance(event, Header):
                self._begin_message(event)
            elif isinstance(event, Body) and self._function is not None:
                self._report_arguments(event.text)
            elif isinstance(event, Body):
                if separator := self._content.separator():
                    self._deltas.append(Content(separator))
                self._deltas.append(Content(event.text, self._num_read))
            self._num_read += len(event.text)
        deltas, self._deltas = self._deltas, []
        return deltas

    def _begin_message(self, header: Header) -> None:
        self._function = header.function if is_name(header.function) else None
        if self._function is None:
            self._content.begin()
        else:
            self._start_call(self._function)

    def _in_head(self, is_last: bool) -> bool:
        raise AssertionError("a reader of messages finds the calls")
