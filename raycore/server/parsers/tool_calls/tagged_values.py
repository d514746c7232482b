"""The base of the parsers for calls in which tags surround the text of each parameter's value."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, cast

from raycore.parts.constraints.grammar.lark import SpecialTokens, alternative, tag_rule
from raycore.server.parsers.tags import num_begun
from raycore.server.parsers.tool_calls.base import Delta, Schemas, ToolParser, as_json
from raycore.server.parsers.tool_calls.parameters import Allowed, Parameter, parameters_of
from raycore.server.parsers.tool_calls.schema_parts import DEFINITIONS
from raycore.server.parsers.tool_calls.value_scanner import ValueScanner, ValueTags, find_last_end
from raycore.structured_outputs import StructuredOutputsParams

_OTHER_REF = re.compile(r'"\$ref": "(?!#/(?:\$defs|definitions)/)')
"""Matches a JSON Schema reference to something other than the definitions, which one parameter's schema lacks."""
_WRITABLE = re.compile(r"[^<>\s]([^<>\n]*[^<>\s])?")


class TaggedValuesParser(ToolParser):
    """Reads the parameters of calls whose values are text between tags.

    The function's schema says to which JSON type a value is converted. A value is passed on once it is complete.
    """

    is_closed_by_tag = True
    end_function: ClassVar[str] = ""
    """The tag after the parameters, before `closing`. Empty: there is none."""
    value_tags: ClassVar[ValueTags]
    around_value: ClassVar[str] = ""
    """White space between a value and its tags, which belongs to neither."""
    after_tag: ClassVar[str] = "\n"
    """White space that the model writes after the tags of functions and parameters."""

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._parameters: Mapping[str, Parameter] | None = None
        """The parameters of the function that is being called; None: its schema doesn't name them."""
        self._parameter = ""
        self._given = set[str]()
        """The parameters that the call has so far."""
        self._scanner = ValueScanner(self.value_tags, self._may_begin)

    @classmethod
    def has_grammar(cls, schemas: Schemas) -> bool:
        """False if a name can't be written in a tag: with `<`, `>`, a newline, or
        white space around it."""
        return all(
            _WRITABLE.fullmatch(each)
            for name, schema in schemas.items()
            for each in (name, *(parameters_of(schema) or ()))
        )

    @classmethod
    @abstractmethod
    def _before_value(cls, name: str, special: SpecialTokens) -> str:
        """Body of a grammar rule: the tags before a value. `name`: what matches the parameter's name in a grammar."""

    @abstractmethod
    def _read_parameter(self) -> tuple[str | None, int]:
        """(name, end) of the tags with which `_buffer` begins, before a value, after any white space.

        The name is None if the tags are incomplete, and empty if there are none.
        """

    @classmethod
    def _call_rules(cls, schemas: Schemas, special: SpecialTokens) -> list[str]:
        """The rules require parameters in the schema's order, and constrain strings only
        if they have an `enum` or a `const`."""
        end = cls.value_tags.end
        after = [json.dumps(cls.around_value), tag_rule(end, special), json.dumps(cls.after_tag)]
        rules = [f"text{'' if end in special else '[lazy]'}: TEXT {' '.join(after)}", f"after_value: {' '.join(after)}"]
        rules.append(f"parameter: {cls._before_value(f'/{_WRITABLE.pattern}/', special)} text")
        for index, (name, schema) in enumerate(schemas.items()):
            parameters = parameters_of(schema)
            parts: list[str] = []
            for number, (key, parameter) in enumerate((parameters or {}).items()):
                tag = cls._before_value(json.dumps(key), special)
                rules.append(f"parameter_{index}_{number}: {tag} {_value_rule(parameter, schema)}")
                parts.append(f"parameter_{index}_{number}{'' if parameter.is_required else '?'}")
            rules.append(f"name_{index}: {json.dumps(cls.prefill(name).removeprefix(cls.prefill(None)).rstrip())}")
            any_or_these = "parameter*" if parameters is None else " ".join(parts)
            rules.append(f"rest_{index}: SPACE? {any_or_these} {json.dumps(cls.end_function)}")
        return rules

    def begin(self, name: str) -> list[Delta]:
        self._start_function(name)
        return self._run(is_last=False)

    def finish(self, is_cut_off: bool = False) -> list[Delta]:
        """If the model itself ends the message, the arguments are complete, even if closing
        tags are missing."""
        deltas = super().finish(is_cut_off)
        if not is_cut_off:
            if self._state == self._in_parameter:
                self._report_parameter(as_json(self._allowed().value_of("")))
            if self._state in (self._in_parameter, self._between_parameters):
                self._end_arguments()
        return deltas + self._run(is_last=True)

    def _start_function(self, name: str) -> None:
        self._start_call(name)
        self._parameters = parameters_of(self._schemas.get(name, {}))
        self._given = set[str]()
        self._state = self._between_parameters

    def _between_parameters(self, is_last: bool) -> bool:
        name, end = self._read_parameter()
        if name:
            self._parameter = name
            self._buffer = self._buffer[end:]
            self._scanner = ValueScanner(self.value_tags, self._may_begin)
            self._state = self._in_parameter
            return True
        rest = self._buffer.lstrip()
        last = self.end_function or self.closing
        if rest.startswith(last):
            self._buffer = rest[len(self.end_function) :]
        elif name is None or last.startswith(rest):
            if is_last:
                self._buffer = ""
            return False
        self._end_arguments()
        return True

    def _end_arguments(self) -> None:
        self._report_arguments("}" if self._given else "{}")
        self._state = self._before_closing

    def _may_begin(self, name: str) -> bool:
        is_known = self._parameters is None or name in self._parameters
        return is_known and name != self._parameter and name not in self._given

    def _in_parameter(self, is_last: bool) -> bool:
        end = self._scanner.find(self._buffer, is_last)
        if end is None and not is_last:
            return False
        if end is None:
            end = find_last_end(self._buffer, self.value_tags, self._may_begin, self._is_cut_off)
        if end is None:
            self._report_cut_off()
            return False
        has_end = self._buffer.startswith(self.value_tags.end, end)
        value = self._buffer[:end].removeprefix(self.around_value)
        # where the value's own tag is missing, the next one begins a line
        value = value.removesuffix(self.around_value if has_end else "\n")
        self._buffer = self._buffer[end:].removeprefix(self.value_tags.end)
        self._report_parameter(as_json(self._allowed().value_of(value)))
        self._state = self._between_parameters
        return True

    def _report_cut_off(self) -> None:
        """Report what there is of a text that is cut off. Other values are left out: a part of a number is another."""
        value = self._buffer.removeprefix(self.around_value)
        value = value[: len(value) - num_begun(value, f"{self.around_value}{self.value_tags.end}")]
        self._buffer = ""
        if self._allowed().is_plain_text:
            self._report_parameter(as_json(value)[:-1])

    def _report_parameter(self, written: str) -> None:
        self._report_arguments(f"{', ' if self._given else '{'}{as_json(self._parameter)}: {written}")
        self._given.add(self._parameter)

    def _allowed(self) -> Allowed:
        parameter = (self._parameters or {}).get(self._parameter)
        return Allowed() if parameter is None else parameter.allowed


def _value_rule(parameter: Parameter, function: Mapping[str, Any]) -> str:
    """Grammar of a parameter's value and the tag after it.

    `function`: the schema of all parameters of the function.
    """
    allowed = parameter.allowed
    if "string" in allowed.types:
        texts = [value if isinstance(value, str) else json.dumps(value) for value in (allowed.values or {}).values()]
        return f"{alternative(StructuredOutputsParams(choice=texts))} after_value" if texts and all(texts) else "text"
    shared = {key: function[key] for key in (*DEFINITIONS, "x-guidance") if key in function}
    written = json.dumps({**cast("Mapping[str, Any]", parameter.schema), **shared})
    if _OTHER_REF.search(written):
        written = json.dumps({"x-guidance": function.get("x-guidance", {})})
    return f"%json {written} after_value"
