"""Rows become requests, and outputs become columns."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from raycore.data.rows import (
    DEFAULTS,
    ERROR,
    continues,
    failed,
    plain,
    pooling_params,
    prompt_of,
    rows_of,
    sampling_params,
    succeeded,
)
from raycore.errors import InvalidRequest
from raycore.outputs import CompletionOutput, Logprob, RequestOutput


def test_rows_have_lists_for_arrays():
    nested = np.empty(2, object)
    nested[:] = [np.array([1, 2]), {"a": np.float32(0.5)}]
    rows = rows_of({"x": [np.array([1, 2]), None], "y": [nested, 3]}, 2)
    assert rows == [{"x": [1, 2], "y": [[1, 2], {"a": 0.5}]}, {"x": None, "y": 3}]
    assert type(plain(np.int64(3))) is int


@pytest.mark.parametrize(
    ("row", "prefers_text", "expected"),
    [
        ({"prompt": "a", "tokenized_prompt": None}, True, {"prompt": "a"}),
        ({"prompt": None, "tokenized_prompt": [1]}, True, {"prompt_token_ids": [1]}),
        ({"prompt": "a", "tokenized_prompt": [1]}, True, {"prompt": "a"}),
        ({"prompt": "a", "tokenized_prompt": [1]}, False, {"prompt_token_ids": [1], "prompt": "a"}),
        ({"prompt": "a", "multimodal_data": {"image": [3]}}, True, {"prompt": "a", "multi_modal_data": {"image": [3]}}),
    ],
)
def test_a_row_has_one_prompt(row, prefers_text, expected):
    assert prompt_of(row, prefers_text=prefers_text) == expected


def test_a_row_without_a_prompt_is_refused():
    with pytest.raises(InvalidRequest, match="one of the columns messages, prompt and tokenized_prompt"):
        prompt_of({"prompt": None, "other": 1}, prefers_text=True)


def through_a_table(*rows):
    """The rows as a stage gets them: a table gives each row the keys of all."""
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra data")
    table = pyarrow.Table.from_pylist(list(rows))
    return rows_of({name: table.column(name).to_pylist() for name in table.column_names}, len(rows))


def test_parameters_are_those_that_are_not_null():
    given = {"temperature": 0.0, "max_tokens": 3, "seed": None, "structured_outputs": {"regex": "a+", "json": None}}
    (row,) = rows_of({"sampling_params": [given], "pooling_params": [{"dimensions": 4, "task": None}]}, 1)
    params = sampling_params(row)
    assert (params.temperature, params.max_tokens, params.seed) == (0.0, 3, None)
    assert params.structured_outputs is not None
    assert params.structured_outputs.regex == "a+"
    assert pooling_params(row).dimensions == 4


def test_a_rows_schema_has_no_keys_of_other_rows_schemas():
    schemas = [
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        {"type": "object", "properties": {"content": {"enum": ["x", "y"]}}, "additionalProperties": False},
        {"type": "array", "items": {"type": "string"}},
    ]
    rows = through_a_table(*({"sampling_params": {"structured_outputs": {"json": each}}} for each in schemas))
    for row, schema in zip(rows, schemas, strict=True):
        asked = sampling_params(row).structured_outputs
        assert asked is not None
        assert asked.json is not None
        assert json.loads(asked.json) == schema


def test_a_rows_messages_have_no_keys_of_other_rows_messages():
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]}
    chats = [
        [{"role": "user", "content": "a"}, called],
        [{"role": "tool", "content": "b", "tool_call_id": "1"}],
    ]
    assert [row["messages"] for row in through_a_table(*({"messages": chat} for chat in chats))] == chats


def test_images_stay_arrays_and_tokens_become_lists():
    image = np.zeros((4, 5, 3), np.uint8)
    parts = [{"type": "image_pil", "image_pil": image}]
    given = {
        "multimodal_data": [{"image": [image, image[..., 0]]}],
        "messages": [[{"role": "user", "content": parts}]],
        "tokenized_prompt": [np.array([1, 2])],
    }
    (row,) = rows_of(given, 1)
    assert row["multimodal_data"]["image"][0] is image
    assert row["multimodal_data"]["image"][1].shape == (4, 5)
    assert row["messages"][0]["content"][0]["image_pil"] is image
    assert row["tokenized_prompt"] == [1, 2]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "the column sampling_params is None, not a dict"),
        ({"no_such": 1}, "no_such"),
        ({"temperature": -1}, "temperature=-1"),
        ({"structured_outputs": "a+"}, "structured_outputs"),
    ],
)
def test_bad_parameters_are_named(given: Any, message):
    with pytest.raises(InvalidRequest, match=message):
        sampling_params({"sampling_params": given})


def test_a_conversation_goes_on_after_its_last_message_unless_that_is_the_users():
    assert continues([{"role": "user"}, {"role": "assistant"}])
    assert not continues([{"role": "assistant"}, {"role": "user"}])
    assert not continues(None)


def test_outputs_become_columns():
    output = RequestOutput("r", "ab", [1, 2], [None, {2: Logprob(-1.0, 1, "b")}])
    output.outputs = [CompletionOutput(0, "cd", [3, 4], logprobs=[{3: Logprob(-0.5, 1, "c")}, {4: Logprob(-2.0)}])]
    row = succeeded(output, request_id=7)
    assert row.keys() == DEFAULTS.keys()
    expected = {
        "prompt": "ab",
        "prompt_token_ids": [1, 2],
        "num_input_tokens": 2,
        "generated_text": "cd",
        "generated_tokens": [3, 4],
        "num_generated_tokens": 2,
        "request_id": 7,
        ERROR: "",
    }
    assert {name: row[name] for name in expected} == expected
    assert row["logprobs"][0] == {3: {"logprob": -0.5, "rank": 1, "decoded_token": "c"}}
    assert row["prompt_logprobs"][0] is None


def test_a_row_that_failed_has_all_columns():
    row = failed({"prompt": "a" * 600}, "InvalidRequest: no", batch_uuid="u")
    assert row.keys() == DEFAULTS.keys()
    assert (len(row["prompt"]), row["request_id"], row["batch_uuid"]) == (500, -1, "u")
    assert row[ERROR] == "InvalidRequest: no"
