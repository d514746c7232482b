"""OpenAI's API as the official client meets it: a real server of the bundled model, and the table of scenarios."""

from __future__ import annotations

import json
from unittest.mock import Mock

import pytest
from conformance import check_operation, operations_of
from openai_scenarios import SCENARIOS, Api, Scenario
from openai_scenarios.table import GENERATES, of_error
from openai_servers import MAX_MODEL_LEN, raycore_server

from raycore import AsyncLLM
from raycore.demo import demo_model_path
from raycore.server import ServerOptions, build_app


@pytest.fixture(scope="module")
def engine(ray_cluster):
    # the table has float32's log probabilities
    engine = AsyncLLM(demo_model_path(), max_model_len=MAX_MODEL_LEN, num_threads=1, dtype="float32")
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def api(engine: AsyncLLM):
    with raycore_server(engine) as api:
        yield api


@pytest.mark.parametrize("row", [row for row in SCENARIOS if row.of == GENERATES], ids=lambda row: row.name)
def test_openai_requests_get_the_answers_of_the_scenario_table(api: Api, row: Scenario):
    assert row.ask(api) == row.expected


NUMBERS = '{"type":"integer","minimum":-100000000000000000000,"maximum":-10000000000000000000}'
LEAST = '{"type":"integer","minimum":-9223372036854775808,"maximum":-9223372036854775808}'
DEEP = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(3000)} | {"d3000": {"type": "integer"}}


@pytest.mark.parametrize("schema", [NUMBERS, LEAST, json.dumps({"$ref": "#/$defs/d0", "$defs": DEEP})])
def test_a_constraint_that_would_crash_the_server_is_the_requests_error(api: Api, schema: str):
    function = {"name": "f", "parameters": json.loads(schema)}
    bodies = {
        "structured_outputs": {"structured_outputs": {"json": json.loads(schema)}},
        "response_format": {"response_format": {"type": "json_schema", "json_schema": {"schema": json.loads(schema)}}},
        "tools": {"tools": [{"type": "function", "function": function}], "tool_choice": "required"},
    }
    for param, body in bodies.items():
        assert of_error(lambda body=body: api.chat(**body)) == [400, "invalid_request_error", param]
    grammar = {"grammar": f"start: %json {schema}"}
    assert of_error(lambda: api.complete(structured_outputs=grammar)) == [
        400,
        "invalid_request_error",
        "structured_outputs",
    ]
    assert api.complete("27 + 58 =", max_tokens=3).choices[0].text.strip() == "85"


class ShortAnswers:
    """The engine, where answers are short unless a request says otherwise, so that many can be had."""

    max_model_len = 64
    max_http_logprobs = 20
    default_sampling_params = {"max_tokens": 4}  # noqa: RUF012

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine

    def __getattr__(self, name: str):
        return getattr(self._engine, name)


OPTIONS = ServerOptions(("demo",), max_n=2, max_sequences=2)
LENGTHS = Mock(
    max_model_len=ShortAnswers.max_model_len,
    max_http_logprobs=ShortAnswers.max_http_logprobs,
    pooling_spec=None,
    **{"get_tokenizer.return_value.vocab_size": 320, "traces.is_on": False},
)
"""All that a document is made from, besides the options; there is no engine yet."""
DOCUMENT = build_app(LENGTHS, OPTIONS).openapi()
OPERATIONS = [
    each
    for each in operations_of(DOCUMENT)
    if not each.endswith(("/render", "/count_tokens"))  # their bodies are those of other paths
]


@pytest.fixture(scope="module")
def app(engine: AsyncLLM):
    return build_app(ShortAnswers(engine), OPTIONS)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_answer_conforms_to_the_openapi_document(operation, app):
    check_operation(DOCUMENT, operation, app)
