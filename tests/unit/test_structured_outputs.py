"""Which constraints are taken, and what is said of the others."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from raycore.errors import InvalidRequest
from raycore.sampling_params import SamplingParams
from raycore.structured_outputs import MAX_CHARACTERS, StructuredOutputsParams


def test_a_schema_is_kept_as_text() -> None:
    schema = {"type": "integer", "maximum": 10**40}
    asked = StructuredOutputsParams(json=schema)
    assert asked == StructuredOutputsParams(json=json.dumps(schema))
    params = SamplingParams(structured_outputs=asked)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert params.clone() == params


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({}, "has none of json, regex, choice, grammar, json_object"),
        ({"json_object": False}, "has none"),
        ({"regex": "a", "choice": ["a"]}, "has regex and choice of"),
        ({"json": 3}, r"json has 3, which is not text"),
        ({"json": {"a": object()}}, "json is not a JSON schema: .*object"),
        ({"json": {"maximum": float("nan")}}, "json is not a JSON schema"),
        ({"regex": b"a"}, "regex has b'a', which is not text"),
        ({"regex": "a\ud800"}, "regex: character 1 is half of a surrogate pair"),
        ({"choice": []}, r"choice=\[\] is not a list of at least one text"),
        ({"choice": "ab"}, "choice='ab' is not a list"),
        ({"choice": ["a", 1]}, "choice has 1, which is not text"),
        ({"json_object": "yes"}, "json_object='yes' is not a boolean"),
        ({"json_object": True, "disable_any_whitespace": 2}, "disable_any_whitespace=2 is not a boolean"),
        (
            {"grammar": "x" * (MAX_CHARACTERS + 1)},
            f"grammar has {MAX_CHARACTERS + 1} characters; at most {MAX_CHARACTERS}",
        ),
        ({"choice": ["x" * MAX_CHARACTERS, "y"]}, f"choice has {MAX_CHARACTERS + 1} characters"),
    ],
)
def test_a_bad_one_is_named(values: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidRequest, match=match):
        StructuredOutputsParams(**values)


def test_it_has_to_be_what_it_is_called() -> None:
    with pytest.raises(InvalidRequest, match=r"structured_outputs=\{'regex': 'a'\} is not StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})  # pyright: ignore[reportArgumentType]


def test_errors_show_its_beginning() -> None:
    assert str(StructuredOutputsParams(regex="a+")) == "structured_outputs.regex='a+'"
    assert str(StructuredOutputsParams(regex="")) == "structured_outputs.regex=''"
    assert len(str(StructuredOutputsParams(regex="a" * 1000))) < 150
