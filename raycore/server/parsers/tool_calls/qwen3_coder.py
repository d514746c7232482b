"""The parser for calls in which tags surround the text of each parameter's value."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, cast

from raycore.grammar.lark import SpecialTokens, alternative
from raycore.server.parsers.tags import num_begun
from raycore.server.parsers.tool_calls.base import Delta, Schemas, ToolParser, as_json
from raycore.server.parsers.tool_calls.parameters import Allowed, Parameter, parameters_of
from raycore.server.parsers.tool_calls.schema_parts import DEFINITIONS
from raycore.server.parsers.tool_calls.value_scanner import ValueScanner, find_last_end
from raycore.structured_outputs import StructuredOutputsParams

_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
_OTHER_REF = re.compile(r'"\$ref": "(?!#/(?:\$defs|definitions)/)')
"""Matches a JSON Schema reference to something other than the definitions, which one parameter's schema lacks."""
_AFTER_VALUE = f"\n{_END_PARAMETER}\n"
_NAME = re.compile(r"[^<>\n]*")
_WRITABLE = re.compile(r"[^<>\s]([^<>\n]*[^<>\s])?")


class Qwen3CoderParser(ToolParser):
    r"""The format of Qwen3-Coder:

    `<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n…</function>\n</tool_call>`.

    Models write values as text. The function's schema says to which JSON type a value is converted. A value is passed
    on once it is complete. Models sometimes leave out `<tool_call>`: then the name must be that of one of the
    functions, and a parameter or the function's end must follow.
    """

    opening = "<tool_call>"
    closing = "</tool_call>"
    is_closed_by_tag = True

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._parameters: Mapping[str, Parameter] | None = None
        """The parameters of the function that is being called; None: its schema doesn't name them."""
        self._parameter = ""
        self._given = set[str]()
        """The parameters that the call has so far."""
        self._scanner = ValueScanner(self._may_begin)

    @classmethod
    def prefill(cls, name: str | None) -> str:
        return f"{cls.opening}\n{_FUNCTION}" + ("" if name is None else f"{name}>\n")

    @classmethod
    def has_grammar(cls, schemas: Schemas) -> bool:
        """See `CallGrammar.has_grammar`. False if a name can't be written in a tag: with `<`, `>`, a newline, or
        white space around it."""
        return all(
            _WRITABLE.fullmatch(each)
            for name, schema in schemas.items()
            for each in (name, *(parameters_of(schema) or ()))
        )

    @classmethod
    def message_grammar(cls, schemas: Schemas, special: SpecialTokens) -> str:
        """See `CallGrammar.message_grammar`. A function's tag also begins a call: the parser reads it as one."""
        call = "(until_opening SPACE? head call closing | until_head call closing?)"
        rules = [f"start: {call}* TEXT", cls._until_opening(special), f'until_head[lazy]: TEXT "{_FUNCTION}"']
        return cls._grammar(rules, schemas, special)

    @classmethod
    def _call_rules(cls, schemas: Schemas, special: SpecialTokens) -> list[str]:
        """See `CallGrammar._call_rules`. The rules require parameters in the schema's order, and constrain strings only
        if they have an `enum` or a `const`."""
        rules = [f"text[lazy]: TEXT {json.dumps(_AFTER_VALUE)}"]
        rules.append(rf'parameter: "{_PARAMETER}" /{_WRITABLE.pattern}/ ">\n" text')
        for index, (name, schema) in enumerate(schemas.items()):
            parameters = parameters_of(schema)
            parts: list[str] = []
            for number, (key, parameter) in enumerate((parameters or {}).items()):
                tag = json.dumps(f"{_PARAMETER}{key}>\n")
                rules.append(f"parameter_{index}_{number}: {tag} {_value_rule(parameter, schema)}")
                parts.append(f"parameter_{index}_{number}{'' if parameter.is_required else '?'}")
            rules.append(f"name_{index}: {json.dumps(f'{name}>')}")
            any_or_these = "parameter*" if parameters is None else " ".join(parts)
            rules.append(f'rest_{index}: SPACE? {any_or_these} "{_END_FUNCTION}"')
        return rules

    def begin(self, name: str) -> list[Delta]:
        self._start_function(name)
        return self._run(is_last=False)

    def finish(self, is_cut_off: bool = False) -> list[Delta]:
        """See `ToolParser.finish`. If the model itself ends the message, the arguments are complete, even if closing
        tags are missing."""
        deltas = super().finish(is_cut_off)
        if not is_cut_off:
            if self._state == self._in_parameter:
                self._report_parameter(as_json(self._allowed().value_of("")))
            if self._state in (self._in_parameter, self._between_parameters):
                self._end_arguments()
        return deltas + self._run(is_last=True)

    def _openings(self) -> tuple[str, ...]:
        return (self.opening, _FUNCTION)

    def _closings(self) -> tuple[str, ...]:
        return (_END_FUNCTION, self.closing)

    def _begin_tag(self, position: int, tag: str) -> None:
        super()._begin_tag(position, tag)
        if tag == _FUNCTION:
            self._opening_end -= len(tag)  # this tag isn't before the call: the call begins with it

    def _in_head(self, is_last: bool) -> bool:
        name, end = _read_tag(self._held, self._opening_end, _FUNCTION)
        is_call = self._is_call(name, end)
        if is_call and name:
            self._held = self._held[end:]
            self._start_function(name)
        elif is_call is None and not is_last:
            return False
        elif is_call is None and self._is_cut_off:
            self._held = ""
        else:
            # without an opening tag, the bracket is content, too: otherwise it would be taken for a call again
            self._give_up(self._opening_end + (0 if self._has_opening else 1))
        return True

    def _is_call(self, name: str | None, end: int) -> bool | None:
        """Whether a function's tag, which ends at `end`, begins a call; None if that is uncertain."""
        if self._has_opening:
            return None if name is None else bool(name)
        if name is None:
            written = self._held[self._opening_end + len(_FUNCTION) :].strip()
            return None if any(each.startswith(written) for each in self._schemas) else False
        rest = self._held[end:].lstrip()
        if name not in self._schemas or rest.startswith((_PARAMETER, _END_FUNCTION)):
            return name in self._schemas
        return None if any(tag.startswith(rest) for tag in (_PARAMETER, _END_FUNCTION)) else False

    def _start_function(self, name: str) -> None:
        self._start_call(name)
        self._parameters = parameters_of(self._schemas.get(name, {}))
        self._given = set[str]()
        self._state = self._between_parameters

    def _between_parameters(self, is_last: bool) -> bool:
        name, end = _read_tag(self._held, 0, _PARAMETER)
        if name:
            self._parameter = name
            self._held = self._held[end:]
            self._scanner = ValueScanner(self._may_begin)
            self._state = self._in_parameter
            return True
        rest = self._held.lstrip()
        if rest.startswith(_END_FUNCTION):
            self._held = rest[len(_END_FUNCTION) :]
        elif name is None or _END_FUNCTION.startswith(rest):
            if is_last:
                self._held = ""
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
        end = self._scanner.find(self._held, is_last)
        if end is None and not is_last:
            return False
        if end is None:
            end = find_last_end(self._held, self._may_begin, self._is_cut_off)
        if end is None:
            self._report_cut_off()
            return False
        value = self._held[:end].removeprefix("\n").removesuffix("\n")
        self._held = self._held[end:].removeprefix(_END_PARAMETER)
        self._report_parameter(as_json(self._allowed().value_of(value)))
        self._state = self._between_parameters
        return True

    def _report_cut_off(self) -> None:
        """Report what there is of a text that is cut off. Other values are left out: a part of a number is another."""
        value = self._held.removeprefix("\n")
        value = value[: len(value) - num_begun(value, f"\n{_END_PARAMETER}")]
        self._held = ""
        if self._allowed().is_plain_text:
            self._report_parameter(as_json(value)[:-1])

    def _report_parameter(self, written: str) -> None:
        self._report_arguments(f"{', ' if self._given else '{'}{as_json(self._parameter)}: {written}")
        self._given.add(self._parameter)

    def _allowed(self) -> Allowed:
        parameter = (self._parameters or {}).get(self._parameter)
        return Allowed() if parameter is None else parameter.allowed

    def _between_calls(self, is_last: bool) -> bool:
        """After a call comes text, or in the same block another function's tag."""
        rest = self._held.lstrip()
        if not self._is_open or not rest.startswith(_FUNCTION):
            if self._is_open and _FUNCTION.startswith(rest) and not is_last:
                return False
            return super()._between_calls(is_last)
        self._held = rest
        self._opening_end = 0
        self._state = self._in_head
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
    return (name[0].strip() if text[name.end()] == ">" else ""), name.end() + 1


def _value_rule(parameter: Parameter, function: Mapping[str, Any]) -> str:
    """Grammar of a parameter's value and the tag after it.

    `function`: the schema of all parameters of the function.
    """
    allowed, after = parameter.allowed, json.dumps(_AFTER_VALUE)
    if "string" in allowed.types:
        texts = [value if isinstance(value, str) else json.dumps(value) for value in (allowed.values or {}).values()]
        return f"{alternative(StructuredOutputsParams(choice=texts))} {after}" if texts and all(texts) else "text"
    shared = {key: function[key] for key in (*DEFINITIONS, "x-guidance") if key in function}
    written = json.dumps({**cast("Mapping[str, Any]", parameter.schema), **shared})
    if _OTHER_REF.search(written):
        written = json.dumps({"x-guidance": function.get("x-guidance", {})})
    return f"%json {written} {after}"
