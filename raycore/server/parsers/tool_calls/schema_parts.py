"""Reads parts of a JSON schema, whatever it contains. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from raycore.parts.constraints.grammar.references import References, escaped

Schema = Mapping[str, Any]
DEFINITIONS = ("$defs", "definitions")
"""The keys of a schema under which it defines others for its references."""

_WITH_SCHEMA = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_WITH_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_WITH_NAMED_SCHEMAS = ("properties", "patternProperties", "dependentSchemas", *DEFINITIONS)


def check_references(schema: Schema) -> None:
    """Raise InvalidRequest if a `$ref` leads nowhere, or only to itself. It has the form `#/path: what is wrong`."""
    references = References(schema)
    for ref, path in _references(schema, ""):
        references.resolve(ref, path)


def named(schema: Schema, key: str) -> Mapping[str, object]:
    """The values of an object in a schema, by name. Empty if there is no object under this key."""
    given: object = schema.get(key)
    return cast("Mapping[str, object]", given) if isinstance(given, Mapping) else {}


def items(schema: Schema, key: str) -> list[Any]:
    """The values of a list in a schema. Empty if there is no list under this key."""
    given: object = schema.get(key)
    return cast("list[Any]", given) if isinstance(given, list) else []


def _references(schema: object, path: str) -> Iterator[tuple[str, str]]:
    """Each `$ref` in the schema at `path`, with its own path."""
    if not isinstance(schema, Mapping):
        return
    schema = cast("Schema", schema)
    ref = schema.get("$ref")
    if isinstance(ref, str):
        yield ref, f"{path}/$ref"
    for key in _WITH_SCHEMA:
        yield from _references(schema.get(key), f"{path}/{key}")
    for key in _WITH_SCHEMAS:
        for index, each in enumerate(items(schema, key)):
            yield from _references(each, f"{path}/{key}/{index}")
    for key in _WITH_NAMED_SCHEMAS:
        for name, each in named(schema, key).items():
            yield from _references(each, f"{path}/{key}/{escaped(name)}")
