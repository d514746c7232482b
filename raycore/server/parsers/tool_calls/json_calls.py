"""Parsers for calls that are written as JSON objects with a function's name and its arguments."""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar, cast

from raycore.server.parsers.tool_calls.base import Delta, Schemas, ToolParser, as_json, is_name
from raycore.server.parsers.tool_calls.json_scanner import JsonScanner

_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*("[^"\\]*(?:\\.[^"\\]*)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.DOTALL
)
"""Matches the part of the object before the arguments, if the keys have the usual order: name, then arguments."""
_FIRST_KEY = re.compile(r'\{\s*"([^"\\]*)["\\]')
_KEYS = frozenset({"name", "arguments", "parameters", "type", "id"})


class JsonCallParser(ToolParser):
    """Base of the parsers for JSON objects. If the name comes before the arguments, passes arguments on as they arrive.

    Otherwise the call is reported when its object is complete.
    """

    arguments_key: ClassVar[str]
    """The key for the arguments with which the model was trained: `arguments` or `parameters`. The parser accepts both.
    """
    needs_arguments: ClassVar[bool]
    """Whether an object without arguments is content and not a call."""
    ends_arguments: ClassVar[str | None] = None
    """A tag that ends the arguments even if their JSON is incomplete."""

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._scanner: JsonScanner | None = None

    @classmethod
    def prefill(cls, name: str | None) -> str:
        # models have tokens for `":` and ` {"`, so the text doesn't end in a space
        given = '"' if name is None else f'{as_json(name)}, "{cls.arguments_key}":'
        return f'{cls._before_object()}{{"name": {given}'

    @classmethod
    def _before_object(cls) -> str:
        return ""

    @classmethod
    def _call_rules(cls, schemas: Schemas) -> list[str]:
        rules: list[str] = []
        for index, (name, schema) in enumerate(schemas.items()):
            head = f'{as_json(name)[1:]}, "{cls.arguments_key}":'
            arguments = json.dumps({"type": "object", **schema})
            rules += [
                f"name_{index}: {json.dumps(head)}",
                f'rest_{index}: arguments_{index} SPACE? "}}"',
                f"arguments_{index}: SPACE? %json {arguments}",
            ]
        return rules

    def begin(self, name: str) -> list[Delta]:
        self._start_call(name)
        self._state = self._before_arguments
        return self._run(is_last=False)

    def _in_head(self, is_last: bool) -> bool:
        if self._read_head():
            return True
        if is_last and self._is_cut_off and self._may_be_call():
            self._held = ""
        elif is_last:
            self._stop_reading()
        return is_last

    def _may_be_call(self) -> bool:
        """Whether an incomplete object at the end of the message is the beginning of a call, and not JSON content."""
        if self._has_opening() or self._follows_call:
            return True
        begun = _compact(self._held[self._opening_end :])
        heads = [_compact(f'{{"name": {as_json(name)}') for name in self._schemas]
        return any(head.startswith(begun) or begun.startswith(head) for head in heads)

    def _has_opening(self) -> bool:
        return self._held[: self._opening_end].endswith(self.opening)

    def _read_head(self) -> bool:
        """Read the beginning of a call, or report it as content. Returns False if more text is needed to decide."""
        begin = self._opening_end
        while begin < len(self._held) and self._held[begin].isspace():
            begin += 1
        if begin == len(self._held):
            return False
        first_key = _FIRST_KEY.match(self._held, begin)
        if self._held[begin] != "{" or (first_key is not None and first_key[1] not in _KEYS):
            self._stop_reading()
            return True
        head = _HEAD.match(self._held, begin)
        name = None if head is None else _parsed(head[1])
        if head is not None and is_name(name):
            self._start_call(name)
            self._held = self._held[head.end() :]
            self._state = self._before_arguments
            return True
        return self._read_whole(begin)

    def _read_whole(self, begin: int) -> bool:
        """Read the whole object of a call whose arguments come before the name or are missing.

        Returns False if the object isn't complete yet.
        """
        if self._scanner is None:
            self._scanner = JsonScanner(begin, strict=True)
        if not self._scanner.advance(self._held):
            return False
        end = self._scanner.position
        call = None if self._scanner.is_broken else self._call_of(self._held[begin:end])
        if call is None:
            self._stop_reading()
            return True
        self._scanner = None
        name, arguments = call
        self._start_call(name)
        self._report_arguments(as_json(arguments))
        self._held = self._held[end:]
        self._state = self._before_closing
        return True

    def _stop_reading(self) -> None:
        self._scanner = None
        # without an opening tag, the bracket itself is content too: otherwise it would be taken for a call again
        self._give_up(self._opening_end + (0 if self._has_opening() else 1))

    def _call_of(self, text: str) -> tuple[str, dict[str, Any]] | None:
        call = _parsed(text)
        if not isinstance(call, dict):
            return None
        call = cast("dict[str, Any]", call)
        name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
        if arguments is None and not self.needs_arguments:
            arguments = {}
        if not is_name(name) or not isinstance(arguments, dict):
            return None
        return name, cast("dict[str, Any]", arguments)

    def _before_arguments(self, is_last: bool) -> bool:
        self._held = self._held.lstrip()
        self._scanner = JsonScanner(until=self.ends_arguments)
        if self._held:
            self._state = self._in_arguments
        return bool(self._held)

    def _in_arguments(self, is_last: bool) -> bool:
        assert self._scanner is not None
        has_ended = self._scanner.advance(self._held)
        end = len(self._held) if is_last and not has_ended else self._scanner.position
        self._report_arguments(self._held[:end])
        self._held = self._held[end:]
        self._scanner.position = 0
        if has_ended:
            self._scanner = None
            self._state = self._after_arguments
        return has_ended

    def _after_arguments(self, is_last: bool) -> bool:
        rest = self._held.lstrip()
        if rest or is_last:
            self._held = rest[1:] if rest.startswith("}") else self._held
            self._state = self._before_closing
        return bool(rest or is_last)


class HermesParser(JsonCallParser):
    """The format of Hermes, Qwen 2.5 and Qwen 3: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

    opening = "<tool_call>"
    closing = "</tool_call>"
    arguments_key = "arguments"
    needs_arguments = False
    ends_arguments = closing

    @classmethod
    def _before_object(cls) -> str:
        return f"{cls.opening}\n"


class Llama3JsonParser(JsonCallParser):
    """The format of Llama 3.1 to 3.3: `{"name": …, "parameters": {…}}`.

    Calls come at the beginning of the message, or after `<|python_tag|>`. They are separated by `;` or white space.
    """

    opening = "<|python_tag|>"
    closing = ";"
    arguments_key = "parameters"
    needs_arguments = True
    needs_opening = False

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._state = self._between_calls

    def _between_calls(self, is_last: bool) -> bool:
        rest = self._held.lstrip()
        if not rest and not is_last:
            return False
        self._opening_end = len(self._held) - len(rest)
        self._state = self._in_head if rest.startswith("{") else self._in_text
        return True


def _parsed(text: str) -> Any:
    """The value of a JSON text; None if the text isn't JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _compact(text: str) -> str:
    """The text without white space."""
    return "".join(text.split())
