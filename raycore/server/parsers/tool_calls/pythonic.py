"""The parser for calls that are written as a list of calls in Python."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any, cast

from raycore.parts.constraints.grammar.lark import SpecialTokens
from raycore.sampling_params import is_encodable
from raycore.server.parsers.tool_calls.base import Delta, Schemas, ToolParser, as_json
from raycore.server.parsers.tool_calls.parameters import Allowed, Parameter, parameters_of
from raycore.server.parsers.tool_calls.schema_parts import DEFINITIONS

_NAME = re.compile(r"[\w.-]*")
_KEY = re.compile(r"\s*([\w-]+)\s*=(?=[^=])")
_KEY_BEGUN = re.compile(r"\s*(?:[\w-]+\s*=?)?")
_PLAIN = re.compile(r"""[^"'()\[\]{},]*""")
_IN_STRING = {quote: re.compile(rf"[^{quote}\\]*(?:\\.[^{quote}\\]*)*", re.DOTALL) for quote in "\"'"}
_SEPARATORS = re.compile(r"\A[\s,;]*")
_FENCE = "```"


class PythonicParser(ToolParser):
    """The format of Gemma 3 and Llama 3.2: `[NAME(KEY=VALUE, …), …]`, at the beginning of the message.

    In a fence, `tool_code`, calls may come anywhere, and without the list. Values are literals of Python or JSON. Those
    that aren't of the type that the function's schema says are converted to it if possible. A value is passed on once
    it is complete.
    """

    opening = "```tool_code"
    closing = "]"
    needs_opening = False
    next_call = 'SPACE? "," SPACE? call'
    last = "closing"

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._is_fenced = False
        self._parameters: Mapping[str, Parameter] = {}
        self._parameter: str | None = None
        """The name of the value that is being read; None: it has none, and is left out."""
        self._given = set[str]()
        self._scanner = _ValueScanner()
        self._state = self._between_lists

    @classmethod
    def prefill(cls, name: str | None) -> str:
        return "[" if name is None else f"[{name}("

    @classmethod
    def _introduction(cls) -> str:
        return "head"

    @classmethod
    def has_grammar(cls, schemas: Schemas) -> bool:
        """False if the name of a function has a parenthesis or white space around it, or
        that of a parameter has other characters than letters, digits, `_` and `-`."""
        keys = [key for schema in schemas.values() for key in parameters_of(schema) or ()]
        return all(name == name.strip() and "(" not in name for name in schemas) and all(
            re.fullmatch(r"[\w-]+", key) for key in keys
        )

    @classmethod
    def _call_rules(cls, schemas: Schemas, special: SpecialTokens) -> list[str]:
        """Parameters come in the schema's order, and values are those of JSON."""
        rules = [r'any: /[\w\-]+/ "=" %json {}', 'comma: "," SPACE?']
        for index, (name, schema) in enumerate(schemas.items()):
            parameters = parameters_of(schema)
            rules.append(f"name_{index}: {json.dumps(f'{name}(')}")
            if parameters is None:
                rules.append(f'rest_{index}: (any (comma any)*)? ")"')
                continue
            rules.append(f'rest_{index}: first_{index}_0 ")"')
            for number, (key, parameter) in enumerate(parameters.items()):
                here, after = f"{index}_{number}", f"{index}_{number + 1}"
                rules.append(f"value_{here}: {json.dumps(f'{key}=')} {_value_rule(parameter, schema)}")
                without = ("", "") if parameter.is_required else (f" | first_{after}", f" | more_{after}")
                rules.append(f"first_{here}: value_{here} more_{after}{without[0]}")
                rules.append(f"more_{here}: comma value_{here} more_{after}{without[1]}")
            end = f"{index}_{len(parameters)}"
            rules += [f'first_{end}: ""', f'more_{end}: ""']
        return rules

    def begin(self, name: str) -> list[Delta]:
        self._begin_call(name)
        return self._run(is_last=False)

    def finish(self, is_cut_off: bool = False) -> list[Delta]:
        """If the model itself ends the message, the arguments are complete, even if brackets
        are missing."""
        deltas = super().finish(is_cut_off)
        if not is_cut_off and self._state in (self._between_parameters, self._in_value):
            self._end_arguments()
        return deltas + self._run(is_last=True)

    def _begin_tag(self, position: int, tag: str) -> None:
        super()._begin_tag(position, tag)
        self._is_fenced = True

    def _between_lists(self, is_last: bool) -> bool:
        """At the beginning of the message, or after a list, another list may begin."""
        rest = self._buffer.lstrip()
        if not rest and not is_last:
            return False
        self._opening_end = len(self._buffer) - len(rest)
        self._has_opening = self._is_fenced = False
        self._state = self._in_head if rest.startswith("[") else self._in_text
        return True

    def _in_head(self, is_last: bool) -> bool:
        begin = self._opening_end
        rest = self._buffer[begin:].lstrip()
        rest = rest[rest.startswith("[") :].lstrip()
        written, parenthesis, arguments = rest.partition("(")
        name = written.strip()
        is_call = self._may_begin_call(name, arguments if parenthesis else None)
        if is_call:
            self._buffer = arguments
            self._begin_call(name)
        elif is_call is None and not is_last:
            return False
        elif is_call is None and self._is_cut_off and (any(each.startswith(name) for each in self._schemas)):
            self._buffer = ""
        else:
            # the bracket or the tag is content, too: otherwise it would be taken for a call again
            self._give_up(min(begin + (0 if self._has_opening else 1), len(self._buffer)))
        return True

    def _may_begin_call(self, name: str, arguments: str | None) -> bool | None:
        """Whether a name and the text after its parenthesis begin a call; None if that is uncertain."""
        if arguments is None:
            is_known = any(each.startswith(name) for each in self._schemas)
            return None if is_known or _NAME.fullmatch(name) else False
        if not name or not (name in self._schemas or _NAME.fullmatch(name)):
            return False
        if arguments.lstrip().startswith(")") or _KEY.match(arguments):
            return True
        return None if _KEY_BEGUN.fullmatch(arguments) else False

    def _begin_call(self, name: str) -> None:
        self._start_call(name)
        self._parameters = parameters_of(self._schemas.get(name, {})) or {}
        self._given = set[str]()
        self._state = self._between_parameters

    def _between_parameters(self, is_last: bool) -> bool:
        rest = self._buffer.lstrip().removeprefix(",").lstrip()
        if rest.startswith((")", "]")):
            self._buffer = rest.removeprefix(")")
            self._end_arguments()
            return True
        key = _KEY.match(rest)
        if key is None and _KEY_BEGUN.fullmatch(rest):
            if is_last:
                self._buffer = ""
            return False
        self._parameter = None if key is None else key[1]
        self._buffer = rest if key is None else rest[key.end() :]
        self._scanner = _ValueScanner()
        self._state = self._in_value
        return True

    def _in_value(self, is_last: bool) -> bool:
        end = self._scanner.find(self._buffer)
        if end is None and (not is_last or self._is_cut_off):
            if is_last:
                self._buffer = ""
            return False
        text = self._buffer[:end].strip()
        self._buffer = "" if end is None else self._buffer[end:]
        if self._parameter is not None and self._parameter not in self._given and text:
            parameter = self._parameters.get(self._parameter)
            value = _value_of(text, Allowed() if parameter is None else parameter.allowed)
            self._report_arguments(f"{', ' if self._given else '{'}{as_json(self._parameter)}: {as_json(value)}")
            self._given.add(self._parameter)
        self._state = self._between_parameters
        return True

    def _end_arguments(self) -> None:
        self._report_arguments("}" if self._given else "{}")
        self._state = self._after_call

    def _after_call(self, is_last: bool) -> bool:
        rest = _SEPARATORS.sub("", self._buffer, count=1)
        if not rest:
            if is_last:
                self._buffer = ""
            return False
        is_separated = self._buffer.lstrip().startswith((",", ";"))
        if (is_separated or self._is_fenced) and not rest.startswith(("]", "`")):
            self._buffer = rest
            self._opening_end = 0
            self._has_opening = True
            self._state = self._in_head
            return True
        self._buffer = rest[1:] if rest.startswith("]") else self._buffer
        self._state = self._after_fence if self._is_fenced else self._between_lists
        return True

    def _after_fence(self, is_last: bool) -> bool:
        rest = self._buffer.lstrip()
        if not rest.startswith(_FENCE) and _FENCE.startswith(rest):
            if is_last:
                self._buffer = ""
            return False
        self._buffer = rest[len(_FENCE) :] if rest.startswith(_FENCE) else self._buffer
        self._state = self._between_lists
        return True


class _ValueScanner:
    """Finds where a value ends: before a comma or a closing bracket that is outside of it."""

    def __init__(self) -> None:
        self._position = 0
        """Up to where the text has been scanned."""
        self._depth = 0
        self._quote = ""
        """What ends the string that is being read. Empty: none is."""

    def find(self, text: str) -> int | None:
        """Where the value ends; None if more text is needed. `text` begins with the value."""
        while True:
            self._position = _end(_IN_STRING[self._quote] if self._quote else _PLAIN, text, self._position)
            if self._position == len(text):
                return None
            character = text[self._position]
            if self._quote:
                if character == "\\":
                    return None  # the character that the backslash escapes hasn't arrived yet
                self._quote = ""
            elif character in _IN_STRING:
                self._quote = character
            elif character in "([{":
                self._depth += 1
            elif self._depth == 0:
                return self._position
            elif character in ")]}":
                self._depth -= 1
            self._position += 1


def _end(pattern: re.Pattern[str], text: str, position: int) -> int:
    match = pattern.match(text, position)
    assert match is not None, "the pattern matches the empty string"
    return match.end()


def _value_of(text: str, allowed: Allowed) -> Any:
    """The value that a model means by a literal. It is the text if that is no literal."""
    value = _literal(text)
    if isinstance(value, str):
        return allowed.value_of(value) if "string" not in allowed.types else value
    is_word = isinstance(value, (bool, int, float))
    return text if is_word and allowed.types == frozenset({"string"}) else value


def _literal(text: str) -> Any:
    for read in (json.loads, ast.literal_eval):
        for written in (text, text.replace("\n", "\\n")):
            try:
                value: Any = read(written)
                if is_encodable(json.dumps(value, allow_nan=False)):
                    return value
            except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
                continue
    return text


def _value_rule(parameter: Parameter, function: Mapping[str, Any]) -> str:
    """Grammar of a parameter's value. `function`: the schema of all parameters of the function."""
    shared = {key: function[key] for key in (*DEFINITIONS, "x-guidance") if key in function}
    given = parameter.schema
    schema: Mapping[str, Any] = cast("Mapping[str, Any]", given) if isinstance(given, Mapping) else {}
    return f"%json {json.dumps({**schema, **shared})}"
