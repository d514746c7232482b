"""Parsers for calls that are written as JSON objects with a function's name and its arguments."""

from __future__ import annotations

import json
from typing import ClassVar

from raycore.parts.constraints.grammar.lark import SpecialTokens
from raycore.server.parsers.tool_calls.base import Delta, Schemas, ToolParser, as_json
from raycore.server.parsers.tool_calls.call_object import CallObject, Found
from raycore.server.parsers.tool_calls.json_scanner import JsonScanner

_FIRST_KEYS = (None, "name", "arguments", "parameters", "type", "id")
"""With one of these, an object may begin that is a call without an opening tag. None: no key has arrived yet."""


class JsonCallParser(ToolParser):
    """Base of the parsers for JSON objects. If the name comes before the arguments, passes arguments on as they arrive.

    Otherwise the call is reported when its arguments and its name are complete. Other keys are passed over.
    """

    arguments_key: ClassVar[str]
    """The key for the arguments with which the model was trained: `arguments` or `parameters`. The parser accepts both.
    """
    needs_arguments: ClassVar[bool]
    """Whether an object without arguments is content and not a call."""
    ends_arguments: ClassVar[str | None] = None
    """A tag that ends the arguments even if their JSON is incomplete."""
    before_arguments: ClassVar[str] = ""
    """Body of a grammar rule: what stands between the function's name, or the key for the arguments, and these."""
    after_arguments: ClassVar[str] = 'SPACE? "}"'
    """Body of a grammar rule: what stands between the arguments and `closing`."""

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._object: CallObject | None = None
        self._scanner = JsonScanner()

    @classmethod
    def prefill(cls, name: str | None) -> str:
        # models have tokens for `":` and ` {"`, so the text doesn't end in a space
        given = '"' if name is None else f'{as_json(name)}, "{cls.arguments_key}":'
        return f'{cls._before_object()}{{"name": {given}'

    @classmethod
    def _before_object(cls) -> str:
        return ""

    @classmethod
    def _call_rules(cls, schemas: Schemas, special: SpecialTokens) -> list[str]:
        rules: list[str] = []
        for index, (name, schema) in enumerate(schemas.items()):
            arguments = json.dumps({"type": "object", **schema})
            rules += [
                f"name_{index}: {json.dumps(cls.prefill(name).removeprefix(cls.prefill(None)))}",
                f"rest_{index}: {cls.before_arguments} arguments_{index} {cls.after_arguments}",
                f"arguments_{index}: SPACE? %json {arguments}",
            ]
        return rules

    def begin(self, name: str) -> list[Delta]:
        self._start_call(name)
        self._state = self._before_arguments
        return self._run(is_last=False)

    def _in_head(self, is_last: bool) -> bool:
        return self._in_object(is_last)

    def _in_object(self, is_last: bool) -> bool:
        """The state in which `_buffer` begins with an object that may be a call, after `_opening_end` characters."""
        if self._object is None:
            self._object = CallObject(self._opening_end)
        found = self._object.advance(self._buffer)
        if not self._has_opening and self._object.first_key not in _FIRST_KEYS:
            found = Found.NO_CALL
        if found is Found.END and (self._object.name is None or self.needs_arguments):
            found = Found.NO_CALL
        if found is None:
            return self._wait_for_head(is_last, is_last and self._may_be_call())
        if found is Found.NO_CALL:
            self._stop_reading()
        else:
            self._begin_call(self._object, found)
        return True

    def _wait_for_head(self, is_last: bool, may_be_call: bool) -> bool:
        """Wait for more text. At the end of the message, the text is content, unless it is a call that is cut off."""
        if is_last and self._is_cut_off and may_be_call:
            self._buffer = ""
        elif is_last:
            self._stop_reading()
        return is_last

    def _may_be_call(self) -> bool:
        """Whether an incomplete object at the end of the message is the beginning of a call, and not JSON content."""
        if self._has_opening or self._is_after_call:
            return True
        begun = _compact(self._buffer[self._opening_end :])
        heads = [_compact(f'{{"name": {as_json(name)}') for name in self._schemas]
        return any(head.startswith(begun) or begun.startswith(head) for head in heads)

    def _begin_call(self, call: CallObject, found: Found) -> None:
        assert call.name is not None, "the name has been found"
        self._start_call(call.name)
        self._buffer = self._buffer[call.position :]
        self._object = None
        self._state = self._before_arguments
        if found is not Found.ARGUMENTS:
            self._report_arguments(call.arguments or "{}")
            self._state = self._after_arguments if found is Found.CALL else self._after_object

    def _stop_reading(self) -> None:
        self._object = None
        # without an opening tag, the bracket itself is content too: otherwise it would be taken for a call again
        self._give_up(self._opening_end + (0 if self._has_opening else 1))

    def _before_arguments(self, is_last: bool) -> bool:
        self._buffer = self._buffer.lstrip()
        self._scanner = JsonScanner(until=self.ends_arguments)
        if self._buffer:
            self._state = self._in_arguments
        return bool(self._buffer)

    def _in_arguments(self, is_last: bool) -> bool:
        has_ended = self._scanner.advance(self._buffer)
        end = len(self._buffer) if is_last and not has_ended else self._scanner.position
        self._report_arguments(self._buffer[:end])
        self._buffer = self._buffer[end:]
        self._scanner.position = 0
        if has_ended:
            self._state = self._after_arguments
        return has_ended

    def _after_arguments(self, is_last: bool) -> bool:
        rest = self._buffer.lstrip()
        if rest.startswith(","):
            self._scanner = JsonScanner(until=self.ends_arguments, depth=1)
            self._state = self._in_other_keys
        elif rest or is_last:
            self._state = self._after_object
        return bool(rest or is_last)

    def _in_other_keys(self, is_last: bool) -> bool:
        has_ended = self._scanner.advance(self._buffer)
        if has_ended or is_last:
            self._buffer = self._buffer[self._scanner.position :]
            self._state = self._after_object
        return has_ended

    def _after_object(self, is_last: bool) -> bool:
        rest = self._buffer.lstrip()
        if rest.startswith("}"):  # models sometimes write more brackets than they have opened
            self._buffer = rest[1:]
        elif rest or is_last:
            self._state = self._before_closing
        return bool(rest or is_last)


class HermesParser(JsonCallParser):
    """The format of Hermes, Qwen 2.5 and Qwen 3: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

    opening = "<tool_call>"
    closing = "</tool_call>"
    is_closed_by_tag = True
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
        rest = self._buffer.lstrip()
        if not rest and not is_last:
            return False
        self._opening_end = len(self._buffer) - len(rest)
        self._has_opening = False
        self._state = self._in_head if rest.startswith("{") else self._in_text
        return True


def _compact(text: str) -> str:
    """The text without white space."""
    return "".join(text.split())
