"""The parsers for calls in which each parameter's name and value have tags of their own."""

from __future__ import annotations

import json
import re

from raycore.parts.constraints.grammar.lark import SpecialTokens, tag_rule
from raycore.server.parsers.tool_calls.base import ToolParser
from raycore.server.parsers.tool_calls.tagged_values import TaggedValuesParser
from raycore.server.parsers.tool_calls.value_scanner import ValueTags

_KEY, _END_KEY = "<arg_key>", "</arg_key>"
_VALUE, _END_VALUE = "<arg_value>", "</arg_value>"
_HEAD = re.compile(r"\s*([^<>\n]*)(\s*)")
_USUAL_NAME = re.compile(r"[\w.:/-]*")
_PARAMETER = re.compile(rf"\s*{_KEY}([^<>\n]*)({_END_KEY})?\s*({_VALUE})?")


class Glm45Parser(TaggedValuesParser):
    r"""The format of GLM-4.5 to 4.7:

    `<tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n…</tool_call>`.

    White space between the tags may be missing. Prompts and grammars of this class have the newlines of GLM-4.5 and
    4.6. Models sometimes leave out one of the tags between a key and its value.
    """

    opening = "<tool_call>"
    closing = "</tool_call>"
    last = "closing"
    value_tags = ValueTags(
        tag=re.compile(
            rf"<tool_call>[\w.:/-]+\s*(?={_KEY})|</tool_call>|{_KEY}([^<>\n]*){_END_KEY}(?=\s*{_VALUE})|{_END_VALUE}"
        ),
        begun=re.compile(
            rf"<(?:tool_call>[^<>\s]*\s*(?:<[^<>\s]*)?|arg_key>[^<>\n]*(?:{_END_KEY}\s*)?(?:<[^<>\s]*)?|[^<>\s]*)\Z"
        ),
        end=_END_VALUE,
        function="<tool_call>",
        end_function="</tool_call>",
        after={_END_VALUE: (_KEY, "</tool_call>", "<tool_call>"), "</tool_call>": ("<tool_call>",)},
    )

    @classmethod
    def tags(cls) -> tuple[str, ...]:
        return (cls.opening, cls.closing, _KEY, _END_KEY, _VALUE, _END_VALUE)

    @classmethod
    def as_written(cls, calls: str) -> type[ToolParser]:
        head = _HEAD.match(calls.partition(cls.opening)[2])
        return Glm47Parser if head is not None and head[1] and head.end() == head.end(1) else Glm45Parser

    @classmethod
    def prefill(cls, name: str | None) -> str:
        return cls.opening + ("" if name is None else f"{name}{cls.after_tag}")

    @classmethod
    def _before_value(cls, name: str, special: SpecialTokens) -> str:
        key, end_key, value = (tag_rule(tag, special) for tag in (_KEY, _END_KEY, _VALUE))
        return f"{key} {name} {end_key} {json.dumps(cls.after_tag)} {value}"

    def _in_head(self, is_last: bool) -> bool:
        head = _HEAD.match(self._buffer, self._opening_end)
        assert head is not None, "the pattern matches the empty string"
        name, rest = head[1].strip(), self._buffer[head.end() :]
        is_call = self._is_call(name, rest)
        if is_call is None and is_last and ("\n" in head[2] or rest):
            is_call = name in self._schemas
        if is_call:
            self._buffer = rest
            self._start_function(name)
        elif is_call is None and not is_last:
            return False
        elif is_call is None and self._is_cut_off:
            self._buffer = ""
        else:
            self._give_up(self._opening_end)
        return True

    def _is_call(self, name: str, rest: str) -> bool | None:
        """Whether a name, and the text after it, belong to a call; None if that is uncertain."""
        if not _USUAL_NAME.fullmatch(name) and not any(each.startswith(name) for each in self._schemas):
            return False
        if any(rest.startswith(tag) for tag in (_KEY, self.closing)):
            return bool(name)
        return None if any(tag.startswith(rest) for tag in (_KEY, self.closing)) else False

    def _read_parameter(self) -> tuple[str | None, int]:
        tags = _PARAMETER.match(self._buffer)
        if tags is None:
            return (None if _KEY.startswith(self._buffer.lstrip()) else ""), 0
        if tags[3] is None:
            rest = self._buffer[tags.end() :]
            if any(tag.startswith(rest) for tag in (_VALUE, *(() if tags[2] else (_END_KEY,)))):
                return None, 0
            if tags[2] is None:
                return "", 0
        return tags[1].strip(), tags.end()


class Glm47Parser(Glm45Parser):
    """Has the form of GLM-4.7, without newlines, in prompts and grammars."""

    after_tag = ""
