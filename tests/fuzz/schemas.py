"""Random JSON schemas for `constraints.py`: what clients send, and what nobody should."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

_NAMES = ("a", "b", "ab", "key", "x-1", "é", 'q"', "$ref", "a/b", "")
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_PATTERNS = (
    "^[a-z]{2,5}$",
    "a|b",
    "^a",
    "b$",
    r"^\d+\.\d\d$",
    r"\w",
    r"^\S+@\S+$",
    "^(ab){0,3}$",
    "[^x]",
    "(",
    "(?=a)b",
    "^a{1,50}$",
)
_FORMATS = (
    *("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"),
    *("regex", "iri", "uri-reference", "json-pointer", "int32", "password"),
)
_ANNOTATIONS: dict[str, tuple[Any, ...]] = {
    "title": ("T",),
    "description": ("some text",),
    "default": (1, {"$ref": "nowhere"}, None),
    "examples": ([1, "a"],),
    "deprecated": (True,),
    "readOnly": (True,),
    "writeOnly": (False,),
    "$comment": ("no comment",),
    "contentMediaType": ("text/html",),
    "contentEncoding": ("base64",),
    "contentSchema": ({"type": "object"},),
    "x-vendor": ({"type": "nothing"}, 3),
    "discriminator": ({"propertyName": "a"},),
    "nullable": (True,),
}
_NUMBERS: tuple[int | float, ...] = (
    *(0, 1, -1, 2, 3, 5, 7, 10, 99, 100, 101, 255, 1000, -17, -1000, 65535, 123456, 2**31 - 1, 2**53, -(2**53)),
    *(0.5, -0.5, 0.1, 1.5, 2.75, -3.25, 1e-7, 0.001, 99.99, 1e15, 123456.789, -0.0, 1.0),
    *(2**53 + 1, 2**63 - 1, -(2**63), 2**63, 2**64, -(10**20), -(10**19), 1e100, -1e300, 1e-300, 5e-324),
)
_LENGTHS = (0, 0, 1, 1, 2, 3, 5, 10, 100, 5000, 10**6, 2**31 - 1, 2**32, 10**30, -1, 2.0, 1.5)
_CANNOT = (
    "not",
    "if",
    "then",
    "uniqueItems",
    "contains",
    "propertyNames",
    "dependentRequired",
    "unevaluatedProperties",
)


def own_schemas(seed: int) -> Iterator[str]:
    """Endless schemas, as JSON text."""
    for number in itertools.count():
        yield json.dumps(_Writer(random.Random(f"{seed} {number}")).document())


def hypothesis_schemas(seed: int, count: int) -> Iterator[str]:
    """`count` schemas of hypothesis-jsonschema (`pip install hypothesis-jsonschema`), as JSON text: instances of a
    schema of schemas."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as hypothesis_seed
    from hypothesis.internal.conjecture.utils import many
    from hypothesis_jsonschema import from_schema

    if not hasattr(many, "more"):
        many.more = _more  # type: ignore[attr-defined]  # version 0.23 needs it, which Hypothesis no longer has
    found: list[str] = []

    @hypothesis_seed(seed)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(from_schema(_schema_of_schemas(1)))
    def collect(schema: Any) -> None:
        found.append(json.dumps(schema))

    collect()
    yield from found


def _more(elements: Any) -> bool:
    """Whether a collection of Hypothesis gets another element."""
    if not hasattr(elements, "turns"):
        elements.turns = iter(elements.__enter__())
    has_more = next(elements.turns, elements) is not elements
    if not has_more:
        elements.__exit__(None)
    return has_more


class _Writer:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._is_old = self._chance(0.1)
        self._definitions = rng.sample(_NAMES[:5], rng.choice((0, 0, 1, 2)))

    def document(self) -> Any:
        rng = self._rng
        if self._chance(0.01):
            return rng.choice((True, False, 3, "text", None, [], {}))
        schema = self._schema(0)
        if self._definitions and isinstance(schema, dict):
            schema["$defs"] = {name: self._schema(1) for name in self._definitions}
        if self._is_old and isinstance(schema, dict):
            schema["$schema"] = "http://json-schema.org/draft-07/schema#"
        return schema

    def _schema(self, depth: int) -> Any:
        rng = self._rng
        if self._chance(0.03):
            return rng.choice((True, False, True, {}))
        if self._definitions and self._chance(0.15):
            schema: dict[str, Any] = {"$ref": f"#/$defs/{rng.choice(self._definitions)}"}
            if self._chance(0.2):
                self._add(schema, rng.choice(_TYPES), depth)
            return schema
        schema = {}
        if self._chance(0.12) and depth < 3:
            of = rng.choice(("anyOf", "anyOf", "allOf", "oneOf"))
            schema[of] = [self._schema(depth + 1) for _ in range(rng.choice((1, 2, 2, 3)))]
            if self._chance(0.6):
                return schema
        kinds = rng.sample(_TYPES, rng.choice((1, 1, 1, 1, 1, 2)))
        if depth >= 3:
            kinds = [kind for kind in kinds if kind not in ("array", "object")] or ["string"]
        if self._chance(0.9):
            schema["type"] = kinds[0] if len(kinds) == 1 else kinds
        for kind in kinds:
            self._add(schema, kind, depth)
        if self._chance(0.08):
            values = [self._value(2) for _ in range(rng.randint(1, 4))]
            schema |= rng.choice(({"enum": values}, {"const": values[0]}))
        if self._chance(0.15):
            name = rng.choice(list(_ANNOTATIONS))
            schema[name] = rng.choice(_ANNOTATIONS[name])
        if self._chance(0.02):
            schema[rng.choice(_CANNOT)] = rng.choice((True, False, {}, {"type": "string"}, {"a": ["b"]}))
        parts = list(schema.items())
        if self._chance(0.3):
            rng.shuffle(parts)
        return dict(parts)

    def _add(self, schema: dict[str, Any], kind: str, depth: int) -> None:
        rng = self._rng
        if kind in ("integer", "number"):
            # mostly numbers that can be held
            numbers = _NUMBERS if self._chance(0.1) else _NUMBERS[:32]
            for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
                if self._chance(0.25):
                    schema[name] = rng.choice(numbers)
        elif kind == "string":
            for name in ("minLength", "maxLength"):
                if self._chance(0.2):
                    schema[name] = rng.choice(_LENGTHS)
            if self._chance(0.2):
                schema["pattern"] = rng.choice(_PATTERNS)
            if self._chance(0.2):
                schema["format"] = rng.choice(_FORMATS)
        elif kind == "array":
            self._add_array(schema, depth)
        elif kind == "object":
            self._add_object(schema, depth)

    def _add_array(self, schema: dict[str, Any], depth: int) -> None:
        for name in ("minItems", "maxItems"):
            if self._chance(0.25):
                schema[name] = self._rng.choice(_LENGTHS)
        if self._chance(0.75):
            schema["items"] = self._schema(depth + 1)
        if self._chance(0.2) and not self._is_old:
            schema["prefixItems"] = [self._schema(depth + 1) for _ in range(self._rng.randint(1, 3))]
        if self._chance(0.2) and self._is_old:
            schema["items"] = [self._schema(depth + 1) for _ in range(2)]
            schema["additionalItems"] = self._schema(depth + 1)

    def _add_object(self, schema: dict[str, Any], depth: int) -> None:
        rng = self._rng
        names = rng.sample(_NAMES, rng.randint(0, 4))
        if self._chance(0.85):
            schema["properties"] = {name: self._schema(depth + 1) for name in names}
        if self._chance(0.6):
            schema["required"] = rng.sample(names, rng.randint(0, len(names))) + (["b"] if self._chance(0.1) else [])
        if self._chance(0.4):
            schema["additionalProperties"] = rng.choice((False, False, True, self._schema(depth + 1)))
        if self._chance(0.15):
            patterns = rng.sample(("^a", "^b", "^x-", "y$", "[0-9]", "e"), rng.choice((1, 1, 2)))
            schema["patternProperties"] = {pattern: self._schema(depth + 1) for pattern in patterns}
        for name in ("minProperties", "maxProperties"):
            if self._chance(0.1):
                schema[name] = rng.choice((0, 1, 2, 3, 10))

    def _chance(self, probability: float) -> bool:
        return self._rng.random() < probability

    def _value(self, depth: int) -> Any:
        rng = self._rng
        if depth and self._chance(0.2):
            return rng.choice(([self._value(depth - 1)], {rng.choice(_NAMES): self._value(depth - 1)}))
        texts = ("", "a", "é\n", "\u001b", '"\\', "long text " * 5, "\ud83d\ude00")
        return rng.choice((None, True, False, rng.choice(_NUMBERS[:32]), rng.choice(_NUMBERS), *texts))


def _schema_of_schemas(depth: int) -> dict[str, Any]:
    """A schema whose instances are schemas with at most this nesting."""
    inner: dict[str, Any] = _schema_of_schemas(depth - 1) if depth else {"type": "boolean"}
    length, number = {"type": "integer", "minimum": 0, "maximum": 12}, {"type": ["integer", "number"]}
    named = {"type": "object", "additionalProperties": inner, "maxProperties": 3}
    several = {"type": "array", "items": inner, "minItems": 1, "maxItems": 3}
    return {
        "type": "object",
        "properties": {
            "type": {"enum": [*_TYPES, ["string", "null"], ["integer", "array"]]},
            "enum": {"type": "array", "minItems": 1, "maxItems": 3},
            "minimum": number,
            "maximum": number,
            "multipleOf": {"type": "integer", "minimum": 1, "maximum": 50},
            "minLength": length,
            "maxLength": length,
            "pattern": {"enum": list(_PATTERNS)},
            "format": {"enum": list(_FORMATS)},
            "minItems": length,
            "maxItems": length,
            "items": inner,
            "prefixItems": several,
            "properties": named,
            "patternProperties": {"type": "object", "properties": {"^a": inner, "b$": inner}, "maxProperties": 1},
            "required": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
            "additionalProperties": inner,
            "anyOf": several,
            "allOf": several,
            "title": {"type": "string"},
        },
        "additionalProperties": False,
        "maxProperties": 5,
    }
