"""Follows the references in a JSON schema (`$ref`). Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast
from urllib.parse import unquote

Schema = Mapping[str, Any]
DEFINITIONS = ("$defs", "definitions")
"""The keys of a schema under which it defines others for its references."""

_WITH_SCHEMA = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_WITH_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_WITH_NAMED_SCHEMAS = ("properties", "patternProperties", "dependentSchemas", *DEFINITIONS)


def problem_of(schema: Schema) -> str | None:
    """What is wrong with the references in a schema, if anything."""
    checked = set[str]()
    for ref in _references(schema):
        chain = set[str]()
        while ref not in checked:
            if (found := find(ref, schema)) is None:
                return (
                    f"have a $ref to {ref!r}, which isn't in their schema: define it there, "
                    "and refer to it by its path, such as '#/$defs/NAME'"
                )
            if ref in chain:
                return f"have a $ref to {ref!r}, which is defined only as itself"
            chain.add(ref)
            following: object = cast("Schema", found).get("$ref") if isinstance(found, Mapping) else None
            if not isinstance(following, str):
                break
            ref = following
        checked |= chain
    return None


def find(ref: str, root: Schema) -> object | None:
    """What a reference refers to; None if there is no such part of the schema."""
    if ref != "#" and not ref.startswith("#/"):
        return None
    found: Any = root
    for part in ref.split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            parts = cast("list[Any]", found)
            found = parts[int(key)] if key.isdecimal() and int(key) < len(parts) else None
        else:
            found = cast("Schema", found).get(key) if isinstance(found, Mapping) else None
    return cast("object", found) if isinstance(found, Mapping | bool) else None


def _references(schema: object) -> Iterator[str]:
    """All `$ref` in a schema."""
    if not isinstance(schema, Mapping):
        return
    schema = cast("Schema", schema)
    ref = schema.get("$ref")
    if isinstance(ref, str):
        yield ref
    for key in _WITH_SCHEMA:
        yield from _references(schema.get(key))
    for key in _WITH_SCHEMAS:
        for each in items(schema, key):
            yield from _references(each)
    for key in _WITH_NAMED_SCHEMAS:
        for each in named(schema, key).values():
            yield from _references(each)


def named(schema: Schema, key: str) -> Mapping[str, object]:
    """The values of an object in a schema, by name. Empty if there is no object under this key."""
    given: object = schema.get(key)
    return cast("Mapping[str, object]", given) if isinstance(given, Mapping) else {}


def items(schema: Schema, key: str) -> list[Any]:
    """The values of a list in a schema. Empty if there is no list under this key."""
    given: object = schema.get(key)
    return cast("list[Any]", given) if isinstance(given, list) else []
