"""OpenAI's API as the official client meets it: a real server of the bundled model, and the table of scenarios."""

from __future__ import annotations

import pytest
from openai_scenarios import SCENARIOS, Api, Scenario
from openai_servers import MAX_MODEL_LEN, raycore_server

from raycore import AsyncLLM
from raycore.demo import demo_model_path


@pytest.fixture(scope="module")
def engine(ray_cluster):
    engine = AsyncLLM(demo_model_path(), max_model_len=MAX_MODEL_LEN, num_threads=1, dtype="float32")
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def api(engine: AsyncLLM):
    with raycore_server(engine) as api:
        yield api


@pytest.mark.parametrize("row", SCENARIOS, ids=lambda row: row.name)
def test_an_answer_is_as_the_table_says(api: Api, row: Scenario):
    assert row.ask(api) == row.expected
