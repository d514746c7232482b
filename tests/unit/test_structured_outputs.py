"""Which constraints are taken, and what is said of the others."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from raycore.errors import InvalidRequest
from raycore.sampling_params import SamplingParams
from raycore.structured_outputs import MAX_CHARACTERS, StructuredOutputsParams


def test_a_json_schema_is_kept_as_text() -> None:
    schema = {"type": "integer", "maximum": 10**40}
    asked = StructuredOutputsParams(json=schema)
    assert asked == StructuredOutputsParams(json=json.dumps(schema))
    params = SamplingParams(structured_outputs=asked)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert params.clone() == params


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object, structural_tag, not none"),
        ({"json_object": False}, "not none"),
        ({"regex": "a", "choice": ["a"]}, "not regex and choice"),
        ({"json": 3}, r"json has 3, which isn't a string"),
        ({"json": {"a": object()}}, "json isn't a JSON schema: .*object"),
        ({"json": {"maximum": float("nan")}}, "json isn't a JSON schema"),
        ({"regex": b"a"}, "regex has b'a', which isn't a string"),
        ({"regex": "a\ud800"}, "regex: character 1 is half of a surrogate pair"),
        ({"choice": []}, r"choice=\[\] isn't a list of at least one string"),
        ({"choice": "ab"}, "choice='ab' isn't a list"),
        ({"choice": ["a", 1]}, "choice has 1, which isn't a string"),
        ({"json_object": "yes"}, "json_object='yes' isn't True or False"),
        ({"json_object": True, "disable_any_whitespace": 2}, "disable_any_whitespace=2 isn't True or False"),
        (
            {"grammar": "x" * (MAX_CHARACTERS + 1)},
            f"grammar has {MAX_CHARACTERS + 1} characters; at most {MAX_CHARACTERS}",
        ),
        ({"choice": ["x" * MAX_CHARACTERS, "y"]}, f"choice has {MAX_CHARACTERS + 1} characters"),
    ],
)
def test_invalid_structured_outputs_are_refused_by_name(values: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidRequest, match=match):
        StructuredOutputsParams(**values)


def test_structured_outputs_must_be_a_structuredoutputsparams() -> None:
    with pytest.raises(InvalidRequest, match=r"structured_outputs=\{'regex': 'a'\} isn't a StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})  # pyright: ignore[reportArgumentType]


def test_structured_outputs_are_shown_by_their_beginning_in_errors() -> None:
    assert str(StructuredOutputsParams(regex="a+")) == "structured_outputs.regex='a+'"
    assert str(StructuredOutputsParams(regex="")) == "structured_outputs.regex=''"
    assert len(str(StructuredOutputsParams(regex="a" * 1000))) < 150
