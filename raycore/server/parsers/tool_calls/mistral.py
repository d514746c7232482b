"""The parser for calls behind Mistral's tag `[TOOL_CALLS]`."""

from __future__ import annotations

import re
import uuid

from raycore.parts.constraints.grammar.lark import SpecialTokens, tag_rule
from raycore.server.parsers.tags import num_begun
from raycore.server.parsers.tool_calls.base import Delta, Schemas, ToolParser
from raycore.server.parsers.tool_calls.json_calls import JsonCallParser

_ARGUMENTS, _CALL_ID = "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"\s*([^\[\]{}\n]*)")
_USUAL_NAME = re.compile(r"[\w.:/-]*")
_BEFORE_ARGUMENTS = re.compile(r"\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\]\s*)?")
_ID = "[a-zA-Z0-9]{9}"


class MistralParser(JsonCallParser):
    """The formats of Mistral's models. All of them are read, whichever the model writes.

    The older one is a list of JSON objects: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`. In the newer one, each
    call has a tag of its own: `[TOOL_CALLS]NAME[ARGS]{…}`. There, `[ARGS]` may be missing or preceded by
    `[CALL_ID]ID`. Prompts and grammars of this class have the older form.
    """

    opening = "[TOOL_CALLS]"
    closing = "]"
    arguments_key = "arguments"
    needs_arguments = False
    ends_arguments = opening
    after_arguments = f'(SPACE? "," SPACE? "\\"id\\":" SPACE? /"{_ID}"/)? SPACE? "}}"'
    next_call = 'SPACE? "," SPACE? "{\\"name\\": \\"" call'
    in_text = f"call ({next_call})* closing"

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._is_list: bool = False
        """Whether the call is in a list."""
        self._has_object = True
        """Whether the call is an object that contains the arguments."""

    @classmethod
    def tags(cls) -> tuple[str, ...]:
        return (cls.opening, _ARGUMENTS, _CALL_ID)

    @classmethod
    def as_written(cls, calls: str) -> type[ToolParser]:
        _, tag, written = calls.partition(cls.opening)
        if not tag:
            return cls
        if not written.lstrip().startswith(("[", "{")):
            return MistralNameParser
        return MistralSpaceParser if written.startswith(" ") else MistralParser

    @classmethod
    def call_id(cls) -> str:
        """A new id for a call. The chat templates refuse ids that don't have nine letters or digits."""
        return uuid.uuid4().hex[:9]

    @classmethod
    def _before_object(cls) -> str:
        return f"{cls.opening}["

    def begin(self, name: str) -> list[Delta]:
        self._is_list = True
        return super().begin(name)

    def _in_head(self, is_last: bool) -> bool:
        begin = self._opening_end
        while begin < len(self._buffer) and self._buffer[begin].isspace():
            begin += 1
        first = self._buffer[begin : begin + 1]
        self._is_list = first == "["
        self._has_object = first in ("[", "{")
        if not self._has_object:
            return self._in_name(is_last)
        self._opening_end = begin + self._is_list
        self._state = self._in_object
        return True

    def _in_name(self, is_last: bool) -> bool:
        match = _NAME.match(self._buffer, self._opening_end)
        assert match is not None, "the pattern matches the empty string"
        name = match[1].strip()
        may_be_name = _USUAL_NAME.fullmatch(name) or any(each.startswith(name) for each in self._schemas)
        end = self._end_of_tags(match.end())
        if not may_be_name or (end is not None and (not name or self._buffer[end] != "{")):
            self._stop_reading()
            return True
        if end is None:
            return self._wait_for_head(is_last, may_be_call=True)
        self._start_call(name)
        self._buffer = self._buffer[end:]
        self._state = self._before_arguments
        return True

    def _end_of_tags(self, begin: int) -> int | None:
        """Where the tags between a name and its arguments end; None if more text is needed."""
        tags = _BEFORE_ARGUMENTS.match(self._buffer, begin)
        assert tags is not None, "the pattern matches the empty string"
        rest = self._buffer[tags.end() :]
        is_begun = any(num_begun(rest, tag) == len(rest) for tag in (_CALL_ID, _ARGUMENTS))
        return None if is_begun else tags.end()

    def _after_arguments(self, is_last: bool) -> bool:
        return super()._after_arguments(is_last) if self._has_object else self._after_object(is_last)

    def _before_closing(self, is_last: bool) -> bool:
        if not self._is_list:
            self._state = self._in_text
            return True
        rest = self._buffer.lstrip()
        if rest.startswith(","):
            self._buffer = rest[1:]
        elif rest.startswith("{"):
            self._buffer = rest
            self._opening_end = 0
            self._state = self._in_object
        elif rest:
            self._buffer = rest[1:] if rest.startswith("]") else self._buffer
            self._state = self._in_text
        elif is_last:
            self._buffer = ""
        return bool(rest)


class MistralSpaceParser(MistralParser):
    """The older form as models with SentencePiece tokenizers write it: with a space after the tag."""

    @classmethod
    def _before_object(cls) -> str:
        return f"{cls.opening} ["


class MistralNameParser(MistralParser):
    """Has the newer form in prompts and grammars."""

    next_call = "announced"
    last = ""
    in_text = "call"
    before_arguments, after_arguments = "tags", ""

    @classmethod
    def prefill(cls, name: str | None) -> str:
        return cls.opening + (name or "")

    @classmethod
    def has_grammar(cls, schemas: Schemas) -> bool:
        """False if a name has brackets or a newline, which end a name."""
        return all((name := _NAME.fullmatch(each)) and name[1].strip() == each for each in schemas)

    @classmethod
    def _call_rules(cls, schemas: Schemas, special: SpecialTokens) -> list[str]:
        tag = tag_rule(_ARGUMENTS, special) + ("" if _ARGUMENTS in special else "?")
        call_id = f"call_id: {tag_rule(_CALL_ID, special)} /{_ID}/"
        return [f"tags: call_id? {tag}", call_id, *super()._call_rules(schemas, special)]

    def begin(self, name: str) -> list[Delta]:
        self._start_call(name)
        self._has_object = False
        self._state = self._before_tags
        return self._run(is_last=False)

    def _before_tags(self, is_last: bool) -> bool:
        end = self._end_of_tags(0)
        if end is not None or is_last:
            self._buffer = self._buffer[end or 0 :]
            self._state = self._before_arguments
        return end is not None or is_last
