"""What the schema of a function's parameters says about each of them. Pure.

Parsers turn the text of a value into JSON by it, and grammars allow the texts that parsers read back. All keywords are
resolved here that lead to a schema elsewhere: `$ref`, `anyOf`, `oneOf` and `allOf`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import msgspec

from raycore.errors import InvalidRequest
from raycore.parts.constraints.grammar.references import References
from raycore.server.parsers.tool_calls.schema_parts import DEFINITIONS, Schema, check_references, items, named
from raycore.structured_outputs import MAX_CHARACTERS

_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_ANY = _TYPES | {"any"}
_STRING, _NULL = frozenset({"string"}), frozenset({"null"})
_IN_PYTHON = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "list": "array",
    "dict": "object",
}
"""Python's names of types, which clients write, too."""
_LITERALS = {"None": None, "True": True, "False": False}
"""How the chat template of Qwen3-Coder writes these values, besides JSON."""
_BY_REFERENCE = ("$ref", "anyOf", "oneOf", "allOf")
_MAX_STEPS = 200_000
"""How many subschemas and values may be visited for one function. A short schema can refer to itself so often that it
stands for more than any memory holds."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """The values that a schema allows, as far as the conversion of a text depends on it."""

    types: frozenset[str] = _ANY
    """The JSON types. `number` comes with `integer`. `any` is among them if the schema doesn't restrict the type."""
    values: Mapping[str, Any] | None = None
    """The only allowed values (`enum`, `const`), by their JSON; None: all values of the types."""

    @property
    def is_plain_text(self) -> bool:
        """Whether a text is taken as it is."""
        return "any" in self.types or self.types == _STRING

    def value_of(self, text: str) -> Any:
        """The value that a model means by a text.

        It is the text itself if the schema doesn't restrict the type, allows only strings, or allows nothing else that
        the text could be. With several types, strings come last, as in vLLM: `5` is a number where both are allowed.
        Models write both in the same way.
        """
        if self.is_plain_text:
            return text
        try:
            value = _read(text.strip())
        except (ValueError, RecursionError):
            return text
        if isinstance(value, float) and value.is_integer() and "number" not in self.types:
            value = int(value)
        if isinstance(value, str) or _type_of(value) not in self.types:
            return text
        if "string" not in self.types or self.values is None:
            return value
        return value if _key(value) in self.values else text


class Parameter(NamedTuple):
    """One parameter of a function."""

    schema: object
    """Its schema; None if there is none. References in it refer to the schema of all parameters."""
    allowed: Allowed
    is_required: bool


def parameters_of(schema: Schema) -> dict[str, Parameter] | None:
    """The parameters of a function, by name; None if the schema of its parameters doesn't name any.

    Those that are required but not described come last.

    Raises InvalidRequest if its references make the schema too large.
    """
    references = References(schema)
    schemas, required = _properties(schema, references, set())
    if not schemas and not isinstance(schema.get("properties"), Mapping):
        return None
    parameters: dict[str, Parameter] = {}
    steps = _Steps()
    for name in [*schemas, *sorted(required - schemas.keys())]:
        allowed = _resolved(schemas.get(name), references, frozenset(), {}, steps) or Allowed()
        parameters[name] = Parameter(schemas.get(name), allowed, name in required)
    return parameters


def function_schema(name: str, parameters: Schema | None, beside: Schema) -> dict[str, Any]:
    """The schema of a function's parameters, with the definitions that the function has `beside` its parameters.

    Raises InvalidRequest if a `$ref` leads nowhere, or only to itself, or if the schema is too large.
    """
    schema = dict(parameters or {})
    for key in DEFINITIONS:
        if isinstance(shared := beside.get(key), Mapping):
            schema[key] = {**cast("Schema", shared), **named(schema, key)}
    try:
        if len(msgspec.json.encode(schema)) > MAX_CHARACTERS:
            raise InvalidRequest(f"they have more than {MAX_CHARACTERS:,} characters")
        check_references(schema)
        parameters_of(schema)
    except InvalidRequest as error:
        raise InvalidRequest(f"parameters of function {name!r}: {error}") from error
    except RecursionError:
        raise InvalidRequest(f"parameters of function {name!r}: they are nested too deeply") from None
    return schema


class _Steps:
    """Counts the work for one function."""

    def __init__(self) -> None:
        self._num_left = _MAX_STEPS

    def take(self, num: int = 1) -> None:
        self._num_left -= num
        if self._num_left < 0:
            raise InvalidRequest(f"their references stand for more than {_MAX_STEPS:,} subschemas and values")


def _resolved(
    schema: object, references: References, within: frozenset[str], known: dict[str, Allowed | None], steps: _Steps
) -> Allowed | None:
    """What a schema allows; None if it says nothing but that it is itself.

    Args:
        within: the references that are being resolved.
        known: those that have been resolved, so that none is resolved twice for one parameter.
    """
    steps.take()
    if not isinstance(schema, Mapping):
        return Allowed()
    schema = cast("Schema", schema)
    parts: list[Allowed | None] = [_own(schema, steps)] if schema.keys() - {*_BY_REFERENCE, *DEFINITIONS} else []
    ref = schema.get("$ref")
    if isinstance(ref, str):
        if ref not in known and ref not in within:
            known[ref] = _resolved(_target(ref, references), references, within | {ref}, known, steps)
        parts.append(known.get(ref))
    parts += [_resolved(part, references, within, known, steps) for part in items(schema, "allOf")]
    for key in ("anyOf", "oneOf"):
        if choices := items(schema, key):
            parts.append(_union([_resolved(each, references, within, known, steps) for each in choices], steps))
    return _intersection(parts, steps)


def _own(schema: Schema, steps: _Steps) -> Allowed:
    """What a schema says without looking elsewhere."""
    listed = [schema["const"]] if "const" in schema else items(schema, "enum")
    steps.take(len(listed))
    values = {_key(value): value for value in listed} or None
    given: Any = schema.get("type")
    types = {
        _IN_PYTHON.get(each, each) for each in (items(schema, "type") or [given]) if isinstance(each, str)
    } & _TYPES
    if not types and values is not None:
        types = {_type_of(value) for value in values.values()}
    elif not types:
        types = {"object"} if "properties" in schema else {"array"} if "items" in schema else _ANY
    return Allowed(frozenset(types | {"integer"}) if "number" in types else frozenset(types), values)


def _union(parts: list[Allowed | None], steps: _Steps) -> Allowed | None:
    found = [part for part in parts if part is not None]
    if not found:
        return None
    values: dict[str, Any] | None = {}
    for part in found:
        own = {_key(None): None} if part.types == _NULL else part.values
        if values is None or own is None:
            values = None
        else:
            steps.take(len(own))
            values.update(own)
    return Allowed(frozenset[str]().union(*(part.types for part in found)), values)


def _intersection(parts: list[Allowed | None], steps: _Steps) -> Allowed | None:
    found = [part for part in parts if part is not None]
    if not found:
        return None if parts else Allowed()
    types = _ANY.intersection(*(part.types for part in found))
    values: Mapping[str, Any] | None = None
    for part in found:
        if part.values is None:
            continue
        if values is None:
            values = part.values
        else:
            steps.take(len(values))
            values = {key: value for key, value in values.items() if key in part.values}
    return Allowed(types, values)


def _properties(schema: object, references: References, seen: set[str]) -> tuple[dict[str, object], set[str]]:
    """The schemas of an object's properties, and the names of those that it must have.

    `seen`: the references that have been followed, none of them twice.
    """
    if not isinstance(schema, Mapping):
        return {}, set()
    schema = cast("Schema", schema)
    ref = schema.get("$ref")
    parts = items(schema, "allOf")
    if isinstance(ref, str) and ref not in seen:
        seen.add(ref)
        parts = [_target(ref, references), *parts]
    found = dict(named(schema, "properties"))
    required = {name for name in items(schema, "required") if isinstance(name, str)}
    for part in parts:
        more, needed = _properties(part, references, seen)
        required |= needed
        for name, value in more.items():
            found[name] = {"allOf": [found[name], value]} if name in found else value
    choices: dict[str, list[object]] = {}
    for choice in [*items(schema, "anyOf"), *items(schema, "oneOf")]:
        for name, value in _properties(choice, references, seen)[0].items():
            choices.setdefault(name, []).append(value)
    for name, values in choices.items():
        found.setdefault(name, values[0] if len(values) == 1 else {"anyOf": values})
    return found, required


def _target(ref: str, references: References) -> object | None:
    """What a reference leads to; None if that isn't known without the `$id` of a schema within the schema."""
    try:
        return references.resolve(ref, "")[1]
    except InvalidRequest:
        return None


def _read(text: str) -> Any:
    """The value of a text in JSON, or one of Python's literals. Raises ValueError if it is neither."""
    if text in _LITERALS:
        return _LITERALS[text]
    value = json.loads(text)
    json.dumps(value, allow_nan=False)  # `1e999` and `NaN` can't be written in JSON
    return value


def _type_of(value: object) -> str:
    """The JSON type of a value."""
    return "null" if value is None else _IN_PYTHON[type(value).__name__]


def _key(value: object) -> str:
    """The same text for equal JSON values, and for no others. In Python, 1 and True are equal, too."""
    return json.dumps(value, sort_keys=True)
