"""The OpenAPI document says which values are taken."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fake_engine import FakeEngine

from raycore.sampling_params import RANGES
from raycore.server import ServerOptions, build_app

FIELDS = RANGES.keys() - {"max_tokens", "seed"}  # in requests, these two have other ranges than in SamplingParams


def properties_of(request: str) -> dict[str, Any]:
    document = build_app(FakeEngine(), ServerOptions(("fake", "other"))).openapi()
    return document["components"]["schemas"][request]["properties"]


def edges() -> Iterator[tuple[str, float, bool]]:
    """A field, a value at or beyond the edge of its range, and whether that is taken."""
    for field, schema in properties_of("CompletionRequest").items():
        for alternative in schema.get("anyOf", ()):
            for keyword, outward in (("minimum", -1), ("maximum", 1), ("exclusiveMinimum", -1)):
                if field not in FIELDS or keyword not in alternative:
                    continue
                edge = alternative[keyword]
                is_taken = not keyword.startswith("exclusive") and (field, keyword) != ("min_tokens", "maximum")
                yield field, edge, is_taken  # so many tokens at least are more than any request may have
                yield field, edge + outward, False


@pytest.mark.parametrize(("field", "value", "is_taken"), list(edges()))
def test_numbers_are_accepted_only_within_their_documented_range(client, field, value, is_taken):
    fields = {"temperature": 1, "max_tokens": 4} | {field: value}
    answer = client.complete(**fields)
    assert answer.status == 200 if is_taken else answer.error[2] == field


def test_every_documented_number_has_a_range():
    assert {field for field, _, _ in edges()} == FIELDS


def test_the_openapi_document_tells_this_servers_models_and_unsupported_fields():
    properties = properties_of("ChatCompletionRequest")
    assert properties["model"]["enum"] == ["fake", "other", None]
    assert properties["functions"] == {
        "type": "null",
        "description": "Not supported: deprecated by OpenAI: use tools",
    }
    assert properties["service_tier"]["enum"] == ["auto", "default", None]


def test_a_completion_needs_a_prompt_and_no_header_is_null():
    document = build_app(FakeEngine(), ServerOptions(("fake",))).openapi()
    alternatives = document["components"]["schemas"]["CompletionRequest"]["anyOf"]
    assert [each["required"] for each in alternatives] == [["prompt"], ["prompt_embeds"]]
    operation = document["paths"]["/v1/completions"]["post"]
    (header,) = (each for each in operation["parameters"] if each["in"] == "header")
    assert (header["schema"]["type"], header["schema"]["minimum"]) == ("integer", 0)
