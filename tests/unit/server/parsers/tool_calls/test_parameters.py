"""A text becomes the value that a parameter's schema declares, wherever the schema says it."""

from __future__ import annotations

from typing import Any

import pytest

from raycore.errors import InvalidRequest
from raycore.server.parsers.tool_calls.parameters import function_schema, parameters_of

INTEGER, NUMBER, STRING, NULL = ({"type": each} for each in ("integer", "number", "string", "null"))
DEFINED = {
    "Count": {**INTEGER, "$anchor": "count"},
    "Color": {"enum": ["red", "blue"]},
    "Node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}},
    "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, INTEGER]},
    "a/b~c d": {"type": "boolean"},
}


def value_of(schema, text):
    function = {"type": "object", "properties": {"a": schema}, "$defs": DEFINED}
    return parameters_of(function_schema("f", function, {}))["a"].allowed.value_of(text)


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        (INTEGER, {"5": 5, " -5 ": -5, "5.0": 5, "5.5": "5.5", "five": "five", "null": "null", "true": "true", "": ""}),
        (NUMBER, {"5": 5, "5.5": 5.5, "1e3": 1000.0, "1e999": "1e999", "NaN": "NaN", "5,5": "5,5"}),
        ({"type": "boolean"}, {"true": True, "True": True, "false": False, "1": "1", "yes": "yes"}),
        (NULL, {"null": None, "None": None, "": ""}),
        (
            {"type": "object"},
            {'{"a": [1]}': {"a": [1]}, "[1]": "[1]", "{'a': 1}": "{'a': 1}", '{"a": NaN}': '{"a": NaN}'},
        ),
        ({"type": "array"}, {"[1, null]": [1, None], "[" * 50_000: "[" * 50_000}),
        (STRING, {"123": "123", "null": "null", ' "a" \n': ' "a" \n', "": ""}),
        ({}, {"123": "123", '{"a": 1}': '{"a": 1}'}),
        (True, {"123": "123"}),
        ({"description": "?"}, {"123": "123"}),
        ({"type": ["integer", "null"]}, {"5": 5, "null": None, "None": None, "x": "x"}),
        ({"type": ["string", "null"]}, {"5": "5", "null": None}),
        ({"anyOf": [INTEGER, NULL]}, {"5": 5, "null": None}),
        ({"oneOf": [{"$ref": "#/$defs/Count"}, NULL]}, {"5": 5, "null": None}),
        ({"anyOf": [STRING, INTEGER]}, {"5": 5, "5.5": "5.5", "x": "x", '"5"': '"5"'}),
        ({"anyOf": [STRING, {}]}, {"5": "5"}),
        ({"anyOf": [INTEGER, {"anyOf": [NULL, {"type": "array"}]}]}, {"5": 5, "null": None, "[5]": [5]}),
        ({"allOf": [{"$ref": "#/$defs/Count"}], "description": "?"}, {"5": 5}),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": ["integer", "null"]}]}, {"5": 5, "null": "null"}),
        ({"$ref": "#/$defs/Count"}, {"5": 5}),
        ({"$ref": "#/$defs/Node"}, {'{"next": {}}': {"next": {}}}),
        ({"$ref": "#/$defs/Loop"}, {"5": 5, "x": "x"}),
        ({"$ref": "#/$defs/a~1b~0c%20d"}, {"true": True}),
        ({"$ref": "#count"}, {"5": 5}),
        ({"$ref": "#"}, {'{"a": {}}': {"a": {}}}),
        ({"enum": ["red", 5, None]}, {"red": "red", "5": 5, "6": "6", "null": None, "true": "true"}),
        ({"enum": ["5", "6"]}, {"5": "5"}),
        ({"enum": [1, 2]}, {"1": 1, "3": 3, "true": "true"}),
        ({"const": 5}, {"5": 5}),
        ({"const": True}, {"true": True, "1": "1"}),
        ({"anyOf": [{"$ref": "#/$defs/Color"}, NULL]}, {"red": "red", "null": None, "5": "5"}),
        ({"properties": {"b": INTEGER}}, {'{"b": 1}': {"b": 1}}),
        ({"items": INTEGER}, {"[1]": [1]}),
        ({"type": "float"}, {"1.5": 1.5}),
        ({"type": 5}, {"5": "5"}),
    ],
)
def test_an_arguments_text_becomes_a_value_of_the_declared_type(schema, texts):
    for text, expected in texts.items():
        value = value_of(schema, text)
        assert (value, type(value)) == (expected, type(expected)), text


def test_properties_are_collected_from_all_parts_of_the_schema():
    schema = {
        "$ref": "#/$defs/Base",
        "allOf": [{"properties": {"b": STRING, "a": {"minimum": 1}}, "required": ["c"]}],
        "anyOf": [{"properties": {"kind": {"const": 1}}}, {"properties": {"kind": {"const": 2}}, "required": ["kind"]}],
        "$defs": {"Base": {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}},
    }
    found = parameters_of(function_schema("f", schema, {}))
    assert {name: parameter.is_required for name, parameter in found.items()} == {
        "a": True,
        "b": False,
        "kind": False,
        "c": True,
    }
    assert found["a"].allowed.value_of("5") == 5
    assert found["kind"].allowed.values == {"1": 1, "2": 2}


@pytest.mark.parametrize("schema", [{}, {"type": "object"}, {"properties": 5}, {"required": ["a"]}])
def test_a_schema_may_name_no_parameters(schema):
    assert parameters_of(schema) is None


def test_references_may_be_relative_to_a_schema_within_the_schema():
    inner = {"$id": "https://a.test/b", "properties": {"c": {"$ref": "#/$defs/C"}}, "$defs": {"C": INTEGER}}
    found = parameters_of(function_schema("f", {"properties": {"a": inner, "d": {"$ref": "https://a.test/b"}}}, {}))
    assert [parameter.allowed.value_of("{}") for parameter in found.values()] == [{}, {}]


def test_definitions_may_stand_beside_the_parameters():
    beside = {"$defs": {"A": INTEGER, "B": INTEGER}, "definitions": {"C": {"$ref": "#/$defs/A"}}}
    schema = {"properties": {"c": {"$ref": "#/definitions/C"}, "b": {"$ref": "#/$defs/B"}}, "$defs": {"B": STRING}}
    found = parameters_of(function_schema("f", schema, beside))
    assert [found[name].allowed.value_of("5") for name in "cb"] == [5, "5"]


def test_schemas_with_exponentially_many_references_are_resolved_quickly():
    twice = {f"A{i}": {key: [{"$ref": f"#/$defs/A{i + 1}"}] * 2 for key in ("allOf", "anyOf")} for i in range(60)}
    schema = {
        "$ref": "#/$defs/A0",
        "properties": {"a": {"$ref": "#/$defs/A0"}},
        "$defs": {**twice, "A60": {"properties": {"b": {"$ref": "#/$defs/A0"}}, "required": ["b"]}},
    }
    found = parameters_of(function_schema("f", schema, {}))
    assert {name: sorted(parameter.allowed.types) for name, parameter in found.items()} == {
        "a": ["object"],
        "b": ["object"],
    }


def test_a_schema_that_is_nested_too_deeply_is_refused():
    schema = INTEGER
    for _ in range(3000):
        schema = {"anyOf": [schema]}
    with pytest.raises(InvalidRequest, match="parameters of function 'f': they are nested too deeply"):
        function_schema("f", {"properties": {"a": schema}}, {})


def refer(name: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}"}


def doubling(values: list[int], depth: int) -> dict[str, Any]:
    """Definitions of which each has the values of the one before twice."""
    more = {f"a{n}": {"anyOf": [refer(f"a{n - 1}"), refer(f"a{n - 1}")]} for n in range(1, depth)}
    return {"a0": {"enum": values}} | more


def test_values_that_a_schema_repeats_without_end_are_listed_once():
    schema = {"properties": {"x": refer("a59")}, "$defs": doubling([1, 2], 60)}
    parameters = parameters_of(function_schema("f", schema, {}))
    assert parameters is not None
    assert list((parameters["x"].allowed.values or {}).values()) == [1, 2]


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        (
            {"properties": {f"p{n}": refer("a0") for n in range(3000)}, "$defs": {"a0": {"enum": list(range(3000))}}},
            "stand for more than 200,000",
        ),
        ({"properties": {"x": {"description": "x" * 300_000}}}, "more than 262,144 characters"),
        (
            {"properties": {"x": refer("a")}, "$defs": {"a": {}}, "k" * 60_000: [{} for _ in range(5000)]},
            "shorten its keys",
        ),
    ],
)
def test_small_schemas_that_expand_to_too_much_are_refused(schema, problem):
    with pytest.raises(InvalidRequest, match=problem):
        function_schema("f", schema, {})


def test_a_long_chain_of_references_is_followed_once():
    links = {f"a{n}": refer(f"a{n + 1}") for n in range(7000)} | {"a7000": {"type": "integer"}}
    parameters = parameters_of(function_schema("f", {"properties": {"x": refer("a0")}, "$defs": links}, {}))
    assert parameters is not None
    assert parameters["x"].allowed.types == {"integer"}
