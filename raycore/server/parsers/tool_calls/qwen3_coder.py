"""The parser for calls in which tags surround the text of each parameter's value."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, cast

from raycore.server.parsers.tool_calls.base import Delta, Schemas, ToolParser, as_json

_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
_OTHER_REF = re.compile(r'"\$ref": "(?!#/(?:\$defs|definitions)/)')
"""Matches a JSON Schema reference that can't be resolved within the schema of one parameter."""
_AFTER_VALUE = f"\n{_END_PARAMETER}\n"
_NAME = re.compile(r"[^<>\n]*")
_WRITABLE = re.compile(r"[^<>\n]+")
_AS_PYTHON_WRITES = {"True": True, "False": False, "None": None}


class Qwen3CoderParser(ToolParser):
    r"""The format of Qwen3-Coder:

    `<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n…</function>\n</tool_call>`.

    Models write values as text. The function's schema says to which JSON type a value is converted. A value is passed
    on once it is complete.
    """

    opening = "<tool_call>"
    closing = "</tool_call>"

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._properties: Mapping[str, Any] = {}
        """The schemas of the parameters of the function that is being called."""
        self._parameter = ""
        self._num_parameters = 0
        self._num_searched = 0
        """How many characters of `_held` have been searched for the end of the value."""

    @classmethod
    def prefill(cls, name: str | None) -> str:
        return f"{cls.opening}\n{_FUNCTION}" + ("" if name is None else f"{name}>\n")

    @classmethod
    def has_grammar(cls, schemas: Schemas) -> bool:
        """See `ToolParser.has_grammar`. False if a name has `<`, `>` or a newline, which can't be written in a tag."""
        return all(
            _WRITABLE.fullmatch(each)
            for name, schema in schemas.items()
            for each in (name, *(_parameters(schema) or ()))
        )

    @classmethod
    def _call_rules(cls, schemas: Schemas) -> list[str]:
        """See `ToolParser._call_rules`. The rules require parameters in the schema's order. They don't constrain string
        values, except those with an `enum` or a `const`."""
        rules = [f"text[lazy]: TEXT {json.dumps(_AFTER_VALUE)}"]
        rules.append(rf'parameter: "{_PARAMETER}" /{_WRITABLE.pattern}/ ">\n" text')
        for index, (name, schema) in enumerate(schemas.items()):
            parameters = _parameters(schema)
            parts = [f"parameter_{index}_{number}" for number in range(len(parameters or ()))]
            for part, (key, value) in zip(parts, (parameters or {}).items(), strict=True):
                tag = json.dumps(f"{_PARAMETER}{key}>\n")
                rules.append(f"{part}: {tag} {_value_rule(value, schema)}")
            required = _required(schema)
            said = [part if key in required else f"{part}?" for part, key in zip(parts, parameters or (), strict=True)]
            any_or_these = "parameter*" if parameters is None else " ".join(said)
            rules.append(f"name_{index}: {json.dumps(f'{name}>')}")
            rules.append(f'rest_{index}: SPACE? {any_or_these} "{_END_FUNCTION}"')
        return rules

    def begin(self, name: str) -> list[Delta]:
        self._start_function(name)
        return self._run(is_last=False)

    def _in_head(self, is_last: bool) -> bool:
        name, end = _read_tag(self._held, self._opening_end, _FUNCTION)
        if name is None and (self._is_cut_off or not is_last):
            self._held = "" if is_last else self._held
            return False
        if not name:
            self._give_up(self._opening_end)
            return True
        self._held = self._held[end:]
        self._start_function(name)
        return True

    def _start_function(self, name: str) -> None:
        self._start_call(name)
        properties: object = self._schemas.get(name, {}).get("properties")
        self._properties = cast("Mapping[str, Any]", properties) if isinstance(properties, Mapping) else {}
        self._num_parameters = 0
        self._state = self._between_parameters

    def _between_parameters(self, is_last: bool) -> bool:
        name, end = _read_tag(self._held, 0, _PARAMETER)
        if name:
            self._parameter = name
            self._held = self._held[end:]
            self._num_searched = 0
            self._state = self._in_parameter
            return True
        rest = self._held.lstrip()
        if rest.startswith(_END_FUNCTION):
            self._held = rest[len(_END_FUNCTION) :]
        elif name is None or _END_FUNCTION.startswith(rest):
            if is_last:
                self._held = ""  # the model didn't complete the call, so the arguments stay incomplete, too
            return False
        self._report_arguments("}" if self._num_parameters else "{}")
        self._state = self._before_closing
        return True

    def _in_parameter(self, is_last: bool) -> bool:
        end = self._held.find(_END_PARAMETER, max(0, self._num_searched - len(_END_PARAMETER)))
        self._num_searched = len(self._held)
        if end < 0 and not is_last:
            return False
        value = self._held.removeprefix("\n") if end < 0 else self._held[:end].removeprefix("\n").removesuffix("\n")
        written = as_json(_typed(value, self._properties.get(self._parameter)))
        separator = ", " if self._num_parameters else "{"
        self._report_arguments(f"{separator}{as_json(self._parameter)}: {written[:-1] if end < 0 else written}")
        self._num_parameters += 1
        self._held = "" if end < 0 else self._held[end + len(_END_PARAMETER) :]
        self._state = self._between_parameters
        return True


def _read_tag(text: str, begin: int, tag: str) -> tuple[str | None, int]:
    """(name, end) of a tag such as `<function=NAME>` at position `begin`, after any white space.

    The name is None if the tag is incomplete, and empty if there is no such tag.
    """
    while begin < len(text) and text[begin].isspace():
        begin += 1
    if not text.startswith(tag, begin):
        return (None if tag.startswith(text[begin:]) else ""), begin
    name = _NAME.match(text, begin + len(tag))
    assert name is not None, "the pattern matches the empty string"
    if name.end() == len(text):
        return None, begin
    return (name[0] if text[name.end()] == ">" else ""), name.end() + 1


def _parameters(schema: Mapping[str, Any]) -> dict[str, object] | None:
    """The schemas of a function's parameters, by name; None if the schema doesn't name them."""
    properties: object = schema.get("properties")
    if not isinstance(properties, Mapping):
        return None
    return {**cast("Mapping[str, object]", properties), **dict.fromkeys(sorted(_required(schema) - properties.keys()))}


def _required(schema: Mapping[str, Any]) -> set[str]:
    given: object = schema.get("required")
    names = cast("list[object]", given) if isinstance(given, list) else []
    return {name for name in names if isinstance(name, str)}


def _value_rule(schema: object, function: Mapping[str, Any]) -> str:
    """Grammar of a parameter's value and the tag after it.

    Args:
        schema: the parameter's schema.
        function: the schema of all parameters of the function.
    """
    if not _is_json(schema):
        texts = _texts(schema)
        return f"({' | '.join(map(json.dumps, texts))}) {json.dumps(_AFTER_VALUE)}" if texts else "text"
    shared = {key: function[key] for key in ("$defs", "definitions", "x-guidance") if key in function}
    written = json.dumps({**cast("Mapping[str, Any]", schema), **shared})
    if _OTHER_REF.search(written):
        written = json.dumps({"x-guidance": function.get("x-guidance", {})})
    return f"%json {written} {json.dumps(_AFTER_VALUE)}"


def _texts(schema: object) -> list[str]:
    """The strings that a schema's `enum` or `const` allows. Empty if the schema allows other values."""
    if not isinstance(schema, Mapping):
        return []
    schema = cast("Mapping[str, Any]", schema)
    values: object = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return []
    texts = [text for text in cast("list[object]", values) if isinstance(text, str) and text]
    return texts if len(texts) == len(cast("list[object]", values)) else []


def _typed(value: str, schema: object) -> Any:
    if not _is_json(schema):
        return value
    if value in _AS_PYTHON_WRITES:
        return _AS_PYTHON_WRITES[value]
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _is_json(schema: object) -> bool:
    """Whether models write a value with this schema as JSON, and not as plain text."""
    types = _types(schema)
    return bool(types) and "string" not in types


def _types(schema: object) -> set[str]:
    """The JSON types that a schema or any of its alternatives names."""
    if not isinstance(schema, Mapping):
        return set()
    schema = cast("Mapping[str, Any]", schema)
    given: Any = schema.get("type")
    named = cast("list[object]", given) if isinstance(given, list) else [given]
    types = {each for each in named if isinstance(each, str)}
    for alternatives in (schema.get("anyOf"), schema.get("oneOf")):
        for alternative in cast("list[object]", alternatives) if isinstance(alternatives, list) else []:
            types |= _types(alternative)
    return types
