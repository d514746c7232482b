"""The parser for calls in which tags surround functions and the text of each parameter's value."""

from __future__ import annotations

import json
import re
from typing import ClassVar

from raycore.parts.constraints.grammar.lark import SpecialTokens
from raycore.server.parsers.tool_calls.base import Schemas
from raycore.server.parsers.tool_calls.tagged_values import TaggedValuesParser
from raycore.server.parsers.tool_calls.value_scanner import ValueTags

_NAME = re.compile(r"[^<>\n]*")


class Qwen3CoderParser(TaggedValuesParser):
    r"""The format of Qwen3-Coder:

    `<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n…</function>\n</tool_call>`.

    Models sometimes leave out `<tool_call>`: then the name must be that of one of the functions, and a parameter or the
    function's end must follow.
    """

    opening = "<tool_call>"
    closing = "</tool_call>"
    function: ClassVar[str] = "<function="
    """The tag before the parameters, up to the function's name."""
    end_function = "</function>"
    parameter: ClassVar[str] = "<parameter="
    """The tag before a value, up to the parameter's name."""
    quote: ClassVar[str] = ""
    """What stands around names in tags."""
    around_value = "\n"
    value_tags = ValueTags(
        tag=re.compile(r"<function=[^<>\n]*>|</function>|<parameter=([^<>\n]*)>|</parameter>|</tool_call>"),
        begun=re.compile(r"<[^<>\n]*\Z"),
        end="</parameter>",
        function="<function=",
        end_function="</function>",
        after={
            "</parameter>": ("<parameter=", "</function>", "</tool_call>", "<function=", "<tool_call>"),
            "</function>": ("</tool_call>", "<function=", "<tool_call>"),
            "</tool_call>": ("<tool_call>",),
        },
    )

    @classmethod
    def prefill(cls, name: str | None) -> str:
        return f"{cls.opening}\n{cls.function}{cls.quote}" + ("" if name is None else f"{name}{cls.quote}>\n")

    @classmethod
    def message_grammar(cls, schemas: Schemas, special: SpecialTokens) -> str:
        """A function's tag also begins a call: the parser reads it as one."""
        call = f"(until_opening SPACE? head {cls.in_text} | until_head call closing?)"
        rules = [f"start: {call}* TEXT", cls._until_opening(special)]
        rules.append(f"until_head[lazy]: TEXT {json.dumps(cls.function + cls.quote)}")
        return cls._grammar(rules, schemas, special)

    @classmethod
    def _before_value(cls, name: str, special: SpecialTokens) -> str:
        return f"{json.dumps(cls.parameter + cls.quote)} {name} {json.dumps(f'{cls.quote}>{cls.around_value}')}"

    def _read_parameter(self) -> tuple[str | None, int]:
        return self._read_tag(0, self.parameter)

    def _openings(self) -> tuple[str, ...]:
        return (self.opening, self.function)

    def _closings(self) -> tuple[str, ...]:
        return (self.end_function, self.closing)

    def _begin_tag(self, position: int, tag: str) -> None:
        super()._begin_tag(position, tag)
        if tag == self.function:
            self._opening_end -= len(tag)  # this tag isn't before the call: the call begins with it

    def _in_head(self, is_last: bool) -> bool:
        name, end = self._read_tag(self._opening_end, self.function)
        is_call = self._is_call(name, end)
        if is_call and name:
            self._buffer = self._buffer[end:]
            self._start_function(name)
        elif is_call is None and not is_last:
            return False
        elif is_call is None and self._is_cut_off:
            self._buffer = ""
        else:
            # without an opening tag, the bracket is content, too: otherwise it would be taken for a call again
            self._give_up(self._opening_end + (0 if self._has_opening else 1))
        return True

    def _is_call(self, name: str | None, end: int) -> bool | None:
        """Whether a function's tag, which ends at `end`, begins a call; None if that is uncertain."""
        if self._has_opening:
            return None if name is None else bool(name)
        if name is None:
            written = self._name(self._buffer[self._opening_end + len(self.function) :])
            return None if any(each.startswith(written) for each in self._schemas) else False
        rest = self._buffer[end:].lstrip()
        if name not in self._schemas or rest.startswith((self.parameter, self.end_function)):
            return name in self._schemas
        return None if any(tag.startswith(rest) for tag in (self.parameter, self.end_function)) else False

    def _between_calls(self, is_last: bool) -> bool:
        """After a call comes text, or in the same block another function's tag."""
        rest = self._buffer.lstrip()
        if not self._is_open or not rest.startswith(self.function):
            if self._is_open and self.function.startswith(rest) and not is_last:
                return False
            return super()._between_calls(is_last)
        self._buffer = rest
        self._opening_end = 0
        self._state = self._in_head
        return True

    def _read_tag(self, begin: int, tag: str) -> tuple[str | None, int]:
        """(name, end) of a tag such as `<function=NAME>` at position `begin` of `_buffer`, after any white space.

        The name is None if the tag is incomplete, and empty if there is no such tag.
        """
        text = self._buffer
        while begin < len(text) and text[begin].isspace():
            begin += 1
        if not text.startswith(tag, begin):
            return (None if tag.startswith(text[begin:]) else ""), begin
        name = _NAME.match(text, begin + len(tag))
        assert name is not None, "the pattern matches the empty string"
        if name.end() == len(text):
            return None, begin
        return (self._name(name[0]) if text[name.end()] == ">" else ""), name.end() + 1

    @classmethod
    def _name(cls, written: str) -> str:
        """A name as it is written in a tag, complete or not, without what surrounds it."""
        return written.strip().removeprefix(cls.quote).removesuffix(cls.quote)
