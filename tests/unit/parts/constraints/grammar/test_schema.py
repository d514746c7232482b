"""What a JSON schema becomes before it is compiled, and what is refused by name."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from raycore.errors import InvalidRequest
from raycore.parts.constraints.grammar.embedded import with_enforceable_schemas
from raycore.parts.constraints.grammar.schema import MAX_COUNTS, MAX_DEPTH, enforceable, parse_schema
from raycore.structured_outputs import StructuredOutputsParams


def reduced(schema: Any) -> Any:
    return enforceable(parse_schema(schema if isinstance(schema, str) else json.dumps(schema)))


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"minimum": -(10**20)}, "#/minimum: minimum=-100000000000000000000 can't be held exactly"),
        ({"maximum": 2**53 + 1}, "#/maximum: maximum=9007199254740993 can't be held exactly"),
        ({"exclusiveMinimum": 1e300}, r"#/exclusiveMinimum: exclusiveMinimum=1e\+300 can't be held exactly"),
        (
            {"minimum": 1e-300},
            "#/minimum: minimum=1e-300: at most 15 significant digits and decimal places are compiled",
        ),
        ({"const": 231803989910362.78}, r"#/const: const=231803989910362\.78: at most 15 .*, and it has 17 and 2"),
        ('{"minimum": 0.10000000000000000001}', "the number 0.10000000000000000001 has more digits than a double"),
        ('{"minimum": 1e999}', "the number 1e999 has more digits than a double"),
        ('{"const": NaN}', "NaN isn't JSON"),
        ({"items": {"const": {"a": [2**64]}}}, "#/items/const: const=18446744073709551616 can't be held exactly"),
        ({"enum": [1, 2**63 - 1]}, "#/enum: enum=9223372036854775807 can't be held exactly"),
        ({"enum": [["a\x13b"]]}, r'#/enum: enum="a\\u0013b": the character "\\u0013" can\'t be compiled'),
        ({"const": {"a": "\x7f"}}, "#/const: const=.*can't be compiled"),
        ({"multipleOf": 0}, "#/multipleOf: multipleOf must be greater than 0, not 0"),
        ({"multipleOf": 65536}, "#/multipleOf: multipleOf=65536 is too large"),
        ({"multipleOf": 4096, "minimum": 0}, "may be at most 4095 beside bounds of numbers"),
        ({"allOf": [{"multipleOf": 65537 // 2}, {"multipleOf": 257}]}, "the least common multiple"),
        ({"maxLength": 2**31}, "#/maxLength: maxLength=2147483648 is too large: at most 2147483647"),
        ({"minItems": -1}, "#/minItems: minItems must be a whole number from 0 on, not -1"),
        ({"minLength": 1.5}, "#/minLength: minLength must be a whole number from 0 on, not 1.5"),
        ({"minimum": "1"}, '#/minimum: minimum must be a number, not "1"'),
        ({"maximum": True}, "#/maximum: maximum must be a number, not true"),
        ({"type": "text"}, '#/type: Invalid type: "text" isn\'t one of array'),
        ({"type": []}, "#/type: Invalid type"),
        ({"enum": []}, r"#/enum: enum must be an array with at least one element, not \[\]"),
        ({"required": "a"}, '#/required: required must be an array, not "a"'),
        ({"properties": []}, r"#/properties: properties must be an object, not \[\]"),
        ({"items": 3}, "#/items: 3 isn't a schema: give an object, true or false"),
        (False, "#: the schema false allows nothing"),
        (nested(MAX_DEPTH + 1), f"subschemas are nested more than {MAX_DEPTH} deep"),
        ({"enum": list(range(5001))}, f"#/enum: the schema has more than {MAX_COUNTS['enum values']} enum values"),
        (
            {"properties": {f"p{i}": True for i in range(5001)}},
            "#/properties: the schema has more than 5000 properties",
        ),
        ({"anyOf": [True] * 1001}, "#/anyOf: the schema has more than 1000 alternatives"),
        ({"$ref": "#/nowhere"}, "#/\\$ref: \\$ref '#/nowhere' points to nothing in this schema"),
        ({"$ref": "https://example.org/schema"}, "other documents aren't read"),
        ({"$ref": "#"}, "leads to nothing but references"),
        (
            {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "items": {"$ref": "#/$defs/a"}},
            "nothing",
        ),
    ],
)
def test_invalid_and_too_large_schemas_are_refused_with_the_place_and_the_reason(schema, reason):
    with pytest.raises(InvalidRequest, match=reason):
        reduced(schema)


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("not", {}),
        ("uniqueItems", True),
        ("contains", {}),
        ("propertyNames", {"maxLength": 3}),
        ("dependentRequired", {"a": ["b"]}),
        ("dependentSchemas", {"a": {}}),
        ("dependencies", {"a": ["b"]}),
        ("unevaluatedProperties", False),
        ("unevaluatedItems", False),
        ("$dynamicRef", "#a"),
        ("minProperties", 2),
    ],
)
def test_keywords_that_cannot_be_enforced_are_refused_unless_the_schema_is_lenient(keyword, value):
    schema = {"type": "object", "properties": {"a/b": {keyword: value}}}
    with pytest.raises(InvalidRequest, match=rf"^#/properties/a~1b/{re.escape(keyword)}: .*can't be enforced"):
        reduced(schema)
    lenient = {"x-guidance": {"lenient": True}}
    assert reduced({**schema, **lenient}) == {"type": "object", "properties": {"a/b": {}}, **lenient}


def test_number_bounds_that_cannot_be_enforced_are_refused_even_in_lenient_schemas():
    with pytest.raises(InvalidRequest, match="can't be held exactly"):
        reduced({"minimum": 2**64, "x-guidance": {"lenient": True}})


def test_if_then_else_is_refused_only_if_it_constrains_anything():
    with pytest.raises(InvalidRequest, match="#/if: if can't be enforced"):
        reduced({"if": {"type": "string"}, "then": {"maxLength": 3}})
    assert reduced({"if": {"type": "string"}}) == {}
    assert reduced({"then": {"maxLength": 3}, "else": False}) == {}


@pytest.mark.parametrize(
    "idle",
    [
        {"uniqueItems": False},
        {"not": False},
        {"propertyNames": True},
        {"unevaluatedProperties": True},
        {"dependentRequired": {}},
        {"minContains": 2},
        {"contains": {"type": "null"}, "minContains": 0},
        {"uniqueItems": True, "maxItems": 1},
        {"minProperties": 1, "required": ["a"]},
        {"format": "int32"},
    ],
)
def test_keywords_without_effect_are_accepted(idle):
    reduced(idle)


def test_annotations_and_unknown_keywords_are_accepted():
    annotations = {
        "title": 1,
        "description": "d",
        "default": 2**64,
        "examples": [{"$ref": "nowhere"}],
        "deprecated": True,
        "readOnly": True,
        "writeOnly": False,
        "$comment": "c",
        "contentMediaType": "text/html",
        "contentEncoding": "base64",
        "contentSchema": {"not": {}},
        "x-vendor": {"not": {}},
        "nullable": True,
        "discriminator": {"propertyName": "a"},
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": "https://example.org/it",
        "$anchor": "here",
    }
    assert reduced({**annotations, "items": {**annotations, "$id": "b", "type": "null"}}) == {"items": {"type": "null"}}


def test_property_names_and_values_that_look_like_keywords_are_kept():
    schema = {"properties": {"not": {"const": {"not": 1, "$ref": "x"}}, "title": True}, "required": ["not"]}
    assert reduced(schema) == schema


@pytest.mark.parametrize(
    ("reference", "around"),
    [
        ("#/$defs/a", {"$defs": {"a": {"type": "null"}}}),
        ("#/definitions/a", {"definitions": {"a": {"type": "null"}}}),
        ("#/components/schemas/a~1b", {"components": {"schemas": {"a/b": {"type": "null"}}}}),
        ("#/%24defs/a%20b", {"$defs": {"a b": {"type": "null"}}}),
        ("#here", {"$defs": {"a": {"$anchor": "here", "type": "null"}}}),
        ("#here", {"$defs": {"a": {"$id": "#here", "type": "null"}}}),
        ("other", {"$id": "https://example.org/it", "$defs": {"a": {"$id": "other", "type": "null"}}}),
        ("https://example.org/it#/$defs/a", {"$id": "https://example.org/it", "$defs": {"a": {"type": "null"}}}),
        ("#/prefixItems/0", {"prefixItems": [{"type": "null"}]}),
        ("#/$defs/a", {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"type": "null"}}}),
    ],
)
def test_references_in_a_schema_are_resolved_to_definitions(reference, around):
    found = reduced({"items": {"$ref": reference}, **around})
    assert found["items"] == {"$ref": "#/$defs/d0"}
    assert found["$defs"] == {"d0": {"type": "null"}}


def test_references_in_a_schema_with_an_id_are_relative_to_it():
    inner = {"$id": "https://example.org/inner", "$defs": {"x": {"type": "null"}}, "items": {"$ref": "#/$defs/x"}}
    assert reduced({"items": inner, "$defs": {"x": True}})["$defs"] == {"d0": {"type": "null"}}


def test_recursive_references_are_kept():
    tree = {"type": "object", "properties": {"child": {"$ref": "#"}, "list": {"$ref": "#/$defs/list"}}}
    found = reduced({**tree, "$defs": {"list": {"items": {"$ref": "#/$defs/list"}}}})
    assert found["properties"] == {"child": {"$ref": "#"}, "list": {"$ref": "#/$defs/d0"}}
    assert found["$defs"] == {"d0": {"items": {"$ref": "#/$defs/d0"}}}


def test_a_chain_of_references_is_resolved_to_one_and_too_deep_a_chain_is_refused():
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)}
    assert reduced({"$defs": {**chain, "d3000": {"type": "null"}}, "$ref": "#/$defs/d0"})["$defs"] == {
        "d0": {"type": "null"}
    }
    chain = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(3000)}
    with pytest.raises(InvalidRequest, match="nested more than"):
        reduced({"$defs": {**chain, "d3000": {"type": "null"}}, "$ref": "#/$defs/d0"})


def test_old_forms_of_items_are_rewritten_to_prefixitems():
    old = {"items": [{"type": "null"}], "additionalItems": {"title": "rest", "const": 1}}
    assert reduced(old) == {"prefixItems": [{"type": "null"}], "items": {"const": 1}}
    assert reduced({"items": {"type": "null"}, "additionalItems": False}) == {"items": {"type": "null"}}
    with pytest.raises(InvalidRequest, match="#/items: items must be a schema beside prefixItems"):
        reduced({"items": [{"type": "null"}], "prefixItems": [True]})


def test_the_order_of_properties_is_kept():
    schema = {"allOf": [{"properties": {"z": True}}], "properties": {"y": True, "a": True}}
    assert json.dumps(reduced(schema)) == json.dumps(schema)


@pytest.mark.parametrize("name", ["idn-email", "regex", "uri-reference"])
def test_formats_that_are_not_enforced_are_refused_for_texts_only(name):
    with pytest.raises(
        InvalidRequest, match=f"#/format: format '{name}' can't be enforced: use pattern, or one of date"
    ):
        reduced({"format": name})
    assert reduced({"type": "integer", "format": name}) == {"type": "integer"}


def test_schemas_in_grammars_are_reduced_too():
    grammar = r"""
        start: "%json {" a /%json {\/"/ b <|%json{|> c // %json {
        # %json {
        a: %json {"type": "null", "title": "}"} "x"
        b: %json{"maximum": 1.50}
    """
    found = with_enforceable_schemas(grammar)
    assert found == grammar.replace('{"type": "null", "title": "}"}', '{"type": "null"}').replace(
        "1.50", "1.5"
    ).replace("%json{", "%json{")
    with pytest.raises(InvalidRequest, match=r"%json '{\"minimum\": 1e30.*#/minimum: minimum=1e\+30 can't be held"):
        with_enforceable_schemas('start: %json {"minimum": 1e30}')
    with pytest.raises(InvalidRequest, match=r"%json '{': Expecting"):
        with_enforceable_schemas("start: %json {")


def test_a_schema_is_text_from_the_beginning():
    """So that what is checked is what is compiled, whatever becomes of the dict."""
    assert isinstance(StructuredOutputsParams(json={"type": "null"}).json, str)
