"""Random calls, written as chat templates write them, come back as they were."""

from __future__ import annotations

import json

import pytest
from call_formats import TEMPLATES, parser_of, pieces_of, read, written
from hypothesis import given, settings
from hypothesis import strategies as st

NAMES = st.from_regex(r"[a-zA-Z0-9_-]{1,10}", fullmatch=True)
MARKUP = [
    *("<tool_call>", "</tool_call> x", "<parameter=other>", "</parameter> x", "<function=g>\n</function>", "<"),
    *("</arg_value> x", "</arg_key>", "<arg_value>"),
    *('<invoke name="g">\n</invoke>', '<parameter name="other">', "</minimax:tool_call> x", "<minimax:tool_call>"),
    *("[f(a=1)]", ")", "'", "```tool_code", "```"),
    *("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "]", "}", "{", '"', "\\", "\n", ", ", "None", "5", "null", "\u2028"),
]
TEXTS = st.text(max_size=10) | st.lists(st.sampled_from(MARKUP), max_size=4).map("".join)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


def type_of(value):
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return {"type": names.get(type(value), "null")}


@st.composite
def functions(draw):
    """(name, arguments, schema) of a function. The schema describes the parameters in any of several ways."""
    arguments = draw(st.dictionaries(NAMES, JSON, max_size=3))
    definitions, properties = {}, {}
    for key, value in arguments.items():
        own = type_of(value)
        definitions[key] = own
        ways = [own, {"$ref": f"#/$defs/{key}"}, {"allOf": [{"$ref": f"#/$defs/{key}"}]}, {"enum": [value]}]
        ways += [{"const": value}, {**own, "description": "?"}, {"oneOf": [{"$ref": f"#/$defs/{key}"}]}]
        if not isinstance(value, str):
            ways += [{"anyOf": [own, {"type": "null"}]}, {"type": [own["type"], "string"]}]
        properties[key] = draw(st.sampled_from(ways))
    return draw(NAMES), arguments, {"type": "object", "properties": properties, "$defs": definitions}


@pytest.mark.parametrize("form", TEMPLATES)
@settings(max_examples=60)
@given(called=st.lists(functions(), min_size=1, max_size=3, unique_by=lambda each: each[0]), size=st.integers(1, 8))
def test_calls_written_by_the_template_are_parsed_back(form, called, size):
    text = written(form, [(name, arguments) for name, arguments, _ in called])
    schemas = {name: schema for name, _, schema in called}
    whole = read(parser_of(form)(schemas), [text])
    assert [(name, json.loads(arguments)) for name, arguments in whole.calls] == [each[:2] for each in called]
    for (_, arguments), (_, expected, _) in zip(whole.calls, called, strict=True):
        types = [type(value) for value in json.loads(arguments).values()]
        assert types == [type(value) for value in expected.values()], "1 and True are different"
    assert whole.content == ""
    assert read(parser_of(form)(schemas), pieces_of(text, size)) == whole
