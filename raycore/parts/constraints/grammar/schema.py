"""Reduces a JSON schema to what llguidance enforces exactly, or refuses it by name. Pure.

llguidance crashes on some schemas, and takes others for something else: it rounds numbers, misses properties, and
resolves only some references. So it gets a schema without annotations, whose numbers it can hold, whose formats are
patterns, and whose references all point into `$defs`.

The vocabulary is that of JSON Schema 2020-12, with draft 4 to 2019-09 where they differ only in names. A keyword that
constrains but can't be enforced is refused, or dropped if the schema's `x-guidance` says `lenient`, which the schemas
of tools do unless they are strict. Keywords that JSON Schema doesn't know are annotations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from raycore.errors import InvalidRequest
from raycore.parts.constraints.grammar import schema_values as values
from raycore.parts.constraints.grammar.formats import FORMATS, UNENFORCED_FORMATS
from raycore.parts.constraints.grammar.references import References, escaped

MAX_DEPTH = 200
"""Maximum nesting of subschemas, including those that references lead to. llguidance recurses, with some 8 KB of stack
for each."""
MAX_COUNTS = {"subschemas": 10_000, "properties": 5_000, "alternatives": 1_000, "enum values": 5_000, "$refs": 5_000}
"""Maximum numbers of parts in one schema."""

_ONE = ("items", "additionalProperties")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_MAPS = ("properties", "patternProperties")
_TRUE_SCHEMAS: tuple[Any, ...] = (True, {})
_IDLE: Mapping[str, Callable[[Any, Mapping[str, Any]], bool]] = {
    "not": lambda value, schema: value is False,
    "if": lambda value, schema: "then" not in schema and "else" not in schema,
    "then": lambda value, schema: "if" not in schema or value in _TRUE_SCHEMAS,
    "else": lambda value, schema: "if" not in schema or value in _TRUE_SCHEMAS,
    "dependencies": lambda value, schema: value == {},
    "dependentSchemas": lambda value, schema: value == {},
    "dependentRequired": lambda value, schema: value == {},
    "propertyNames": lambda value, schema: value in _TRUE_SCHEMAS,
    "unevaluatedItems": lambda value, schema: value in _TRUE_SCHEMAS,
    "unevaluatedProperties": lambda value, schema: value in _TRUE_SCHEMAS,
    "uniqueItems": lambda value, schema: value is False or schema.get("maxItems") in (0, 1),
    "contains": lambda value, schema: schema.get("minContains") == 0 and "maxContains" not in schema,
    "minContains": lambda value, schema: value == 0 or "contains" not in schema,
    "maxContains": lambda value, schema: "contains" not in schema,
    "$dynamicRef": lambda value, schema: False,
    "$recursiveRef": lambda value, schema: False,
}
"""The keywords that can't be enforced, and whether one constrains nothing, given its value and the schema around it."""


def parse_schema(text: str) -> Any:
    """Parse a schema from JSON text. Raises InvalidRequest if it isn't valid JSON, or has a number that isn't exact."""
    try:
        return values.DECODER.decode(text)
    except InvalidRequest:
        raise
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the schema isn't valid JSON: {error}") from error


def enforceable(schema: Any) -> dict[str, Any]:
    """The schema as llguidance gets it.

    Raises:
        InvalidRequest: the schema isn't valid, exceeds a limit, or constrains in a way that can't be enforced. The
            message begins with the JSON pointer of the keyword.
    """
    return _Reduction(schema).reduced()


class _Reduction:
    """Reduces one schema."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._options: Any = _get(schema, "x-guidance")
        self._is_lenient = _get(self._options, "lenient") is True
        self._references = References(schema)
        self._definitions: dict[str, bool | dict[str, Any]] = {}
        """The reduced targets of references, by the targets' pointers."""
        self._counts = dict.fromkeys(MAX_COUNTS, 0)
        self._multiples: list[tuple[str, int | float]] = []
        self._has_bounds = False

    def reduced(self) -> dict[str, Any]:
        reduced = self._subschema(self._schema, "", 0)
        values.check_multiples(self._multiples, has_bounds=self._has_bounds)
        if isinstance(reduced, bool):
            if not reduced:
                raise _refusal("", "the schema false allows nothing")
            return {}
        names = {pointer: f"d{number}" for number, pointer in enumerate(self._definitions)}
        for each in (reduced, *self._definitions.values()):
            _point_at(each, names)
        if names:
            reduced["$defs"] = {name: self._definitions[pointer] for pointer, name in names.items()}
        if self._options is not None:
            reduced["x-guidance"] = self._options
        return reduced

    def _subschema(self, schema: Any, path: str, depth: int) -> bool | dict[str, Any]:
        self._count("subschemas", 1, path)
        if depth > MAX_DEPTH:
            raise _refusal(path, f"subschemas are nested more than {MAX_DEPTH} deep, counting those behind $refs")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise _refusal(path, f"{values.shown(schema)} isn't a schema: give an object, true or false")
        schema = cast("dict[str, Any]", schema)
        # in the order of the schema, because that is the order of an output's properties
        reduced: dict[str, Any] = {}
        for keyword, value in schema.items():
            self._keyword(reduced, keyword, value, schema, f"{path}/{escaped(keyword)}", depth)
        return reduced

    def _keyword(
        self, reduced: dict[str, Any], keyword: str, value: Any, schema: Mapping[str, Any], path: str, depth: int
    ) -> None:
        """Add to `reduced` what a keyword of `schema` becomes, if anything."""
        if keyword == "$ref":
            reduced["$ref"] = self._referred(value, path, depth)
        elif keyword == "items" and isinstance(value, list):
            if "prefixItems" in schema:
                raise _refusal(path, "items must be a schema beside prefixItems")
            self._list(reduced, "prefixItems", cast("list[Any]", value), path, depth)  # as it was called before 2020-12
        elif keyword == "additionalItems":
            if isinstance(schema.get("items"), list):
                reduced["items"] = self._subschema(value, path, depth + 1)
        elif keyword in _ONE:
            reduced[keyword] = self._subschema(value, path, depth + 1)
        elif keyword in _LISTS:
            self._list(reduced, keyword, values.checked(keyword, value, list, path, may_be_empty=False), path, depth)
        elif keyword in _MAPS:
            named = values.checked(keyword, value, dict, path)
            self._count("properties", len(named), path)
            reduced[keyword] = {
                name: self._subschema(each, f"{path}/{escaped(name)}", depth + 1) for name, each in named.items()
            }
        elif keyword == "format":
            self._format(reduced, value, schema, path)
        elif keyword in _IDLE:
            if not _IDLE[keyword](value, schema) and not self._is_lenient:
                raise _refusal(path, f"{keyword} can't be enforced: leave it out, or check the output yourself")
        elif keyword in values.CHECKS:
            self._value(reduced, keyword, value, schema, path)

    def _list(self, reduced: dict[str, Any], keyword: str, schemas: list[Any], path: str, depth: int) -> None:
        if keyword != "prefixItems":
            self._count("alternatives", len(schemas), path)
        # a format may have added to it
        reduced.setdefault(keyword, []).extend(
            self._subschema(each, f"{path}/{number}", depth + 1) for number, each in enumerate(schemas)
        )

    def _value(self, reduced: dict[str, Any], keyword: str, value: Any, schema: Mapping[str, Any], path: str) -> None:
        value = values.CHECKS[keyword](keyword, value, path)
        if keyword == "enum":
            self._count("enum values", len(value), path)
        if keyword == "multipleOf":
            self._multiples.append((path, value))
        self._has_bounds = self._has_bounds or keyword in values.BOUNDS
        if keyword == "minProperties":
            names = values.checked("required", schema.get("required", []), list, path)
            num_missing = value - len(set(map(str, names)))
            if num_missing <= 0:
                return
            if num_missing > 1:
                if self._is_lenient:
                    return
                # a name that isn't listed may come twice, and then counts once
                raise _refusal(path, f"minProperties={value} can't be enforced: name the properties in required")
        reduced[keyword] = value

    def _format(self, reduced: dict[str, Any], value: Any, schema: Mapping[str, Any], path: str) -> None:
        name = values.checked("format", value, str, path)
        if name in UNENFORCED_FORMATS and not self._is_lenient and values.may_be_text(schema):
            raise _refusal(path, f"format {name!r} can't be enforced: use pattern, or one of {', '.join(FORMATS)}")
        if name not in FORMATS:
            return
        pattern = {"pattern": f"^(?:{FORMATS[name]})$"}
        if "pattern" in schema:
            # two patterns for one string: only intersections have both
            others = [kind for kind in values.TYPES if kind not in ("string", "integer")]
            reduced.setdefault("allOf", []).append({"anyOf": [{"type": "string", **pattern}, {"type": others}]})
        else:
            reduced |= pattern

    def _referred(self, reference: Any, path: str, depth: int) -> str:
        """The pointer of a reference's target, which is reduced, too."""
        self._count("$refs", 1, path)
        pointer, target = self._references.resolve(values.checked("$ref", reference, str, path), path)
        if pointer and pointer not in self._definitions:
            self._definitions[pointer] = True  # for a reference in the target to itself
            self._definitions[pointer] = self._subschema(target, pointer, depth + 1)
        return pointer

    def _count(self, what: str, number: int, path: str) -> None:
        self._counts[what] += number
        if self._counts[what] > MAX_COUNTS[what]:
            raise _refusal(path, f"the schema has more than {MAX_COUNTS[what]} {what}")


def _point_at(schema: Any, names: Mapping[str, str]) -> None:
    """Make the references in a reduced schema point at the definitions with these names, in place."""
    if not isinstance(schema, dict):
        return
    schema = cast("dict[str, Any]", schema)
    if "$ref" in schema:
        pointer = schema["$ref"]
        schema["$ref"] = f"#/$defs/{names[pointer]}" if pointer else "#"
    subschemas: list[Any] = [schema[keyword] for keyword in _ONE if keyword in schema]
    for keyword in _LISTS:
        subschemas += schema.get(keyword, [])
    for keyword in _MAPS:
        subschemas += schema.get(keyword, {}).values()
    for each in subschemas:
        for one in cast("list[Any]", each) if isinstance(each, list) else [each]:
            _point_at(one, names)


def _get(value: Any, key: str) -> Any:
    return cast("dict[str, Any]", value).get(key) if isinstance(value, dict) else None


def _refusal(path: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"#{path}: {why}")
