"""Rows of a dataset become requests, and outputs become columns. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from raycore.errors import InvalidRequest
from raycore.json_fields import shortened
from raycore.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from raycore.pooling_params import PoolingParams
from raycore.sampling_params import SamplingParams
from raycore.structured_outputs import StructuredOutputsParams

Row = dict[str, Any]

ERROR = "__inference_error__"
"""The column of a row's error; empty if there is none."""
IMAGE_COLUMNS = {
    "multimodal_data": "multi_modal_data",
    "multimodal_uuids": "multi_modal_uuids",
    "mm_processor_kwargs": "mm_processor_kwargs",
}
"""A prompt's keys for images, by column."""
TAKEN = ("prompt", "tokenized_prompt", "sampling_params", "pooling_params", "tokenization_kwargs", *IMAGE_COLUMNS)
"""The columns that rows no longer have after the engine: it consumes or replaces them."""
_MAX_PROMPT_IN_ERROR = 500
_METRICS = [field.name for field in dataclasses.fields(RequestMetrics)]

DEFAULTS: Row = {
    "prompt": "",
    "prompt_token_ids": None,
    "num_input_tokens": 0,
    "generated_tokens": [],
    "generated_text": "",
    "num_generated_tokens": 0,
    "embeddings": None,
    "metrics": None,
    "logprobs": None,
    "prompt_logprobs": None,
    "request_id": -1,
    "batch_uuid": "",
    "time_taken_llm": -1.0,
    "params": "",
    ERROR: "",
}
"""The columns that the engine adds, with what a row has that failed."""


def rows_of(batch: Mapping[str, Sequence[Any]], size: int) -> list[Row]:
    """The `size` rows of these columns, with lists for arrays, and without the keys that only other rows have."""
    return [{name: _given(name, values[index]) for name, values in batch.items()} for index in range(size)]


def columns_of(rows: Sequence[Row], names: Sequence[str]) -> dict[str, list[Any]]:
    """The columns with these names."""
    return {name: [row[name] for row in rows] for name in names}


def plain(value: Any) -> Any:
    """A value with lists for the arrays in it, and plain numbers: Ray Data makes arrays of lists.

    Arrays of numbers with several dimensions stay: they are images, or embeddings of images.
    """
    if isinstance(value, np.ndarray):
        array = cast("np.ndarray[Any, Any]", value)
        if array.dtype == object:
            return [plain(each) for each in array]
        return array if array.ndim > 1 else array.tolist()
    if isinstance(value, np.generic):
        return cast("Any", value).item()
    if isinstance(value, dict):
        return {name: plain(each) for name, each in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in cast("Sequence[Any]", value)]
    return value


def _given(name: str, value: Any) -> Any:
    value = plain(value)
    if name == "messages" and isinstance(value, list):
        # templates ask whether the content is null
        return [_without_nulls(each, keeps=("content",)) for each in cast("list[Any]", value)]
    return _without_nulls(value)


def _without_nulls(value: Any, keeps: Sequence[str] = ()) -> Any:
    """The value without the keys that are null, except `keeps`. Rows of a table have the keys of all rows."""
    if isinstance(value, dict):
        given = cast("dict[Any, Any]", value)
        return {name: _without_nulls(each) for name, each in given.items() if each is not None or name in keeps}
    return [_without_nulls(each) for each in cast("list[Any]", value)] if isinstance(value, list) else value


def has_messages(row: Row) -> bool:
    """Whether a row has a conversation."""
    return row.get("messages") is not None


def continues(messages: Any) -> bool:
    """Whether the last message is to be continued, as one that isn't the user's."""
    last = cast("list[Any]", messages)[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, dict) and cast("Row", last).get("role") not in ("user", "tool")


def sampling_params(row: Row) -> SamplingParams:
    """The sampling parameters of a row. Raises InvalidRequest."""
    given: Any = row.get("sampling_params")
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"the column sampling_params is {shortened(given)}, not a dict")
    fields: Row = dict(cast("Row", given))
    text = shortened(fields)
    try:
        if fields.get("structured_outputs") is not None:
            fields["structured_outputs"] = StructuredOutputsParams(**fields["structured_outputs"])
        return SamplingParams.from_optional(**fields)
    except (TypeError, AttributeError) as error:
        raise InvalidRequest(f"sampling_params={text}: {error}") from None


def pooling_params(row: Row) -> PoolingParams:
    """The pooling parameters of a row, by default the model's. Raises InvalidRequest."""
    given = row.get("pooling_params")
    if given is None:
        return PoolingParams()
    try:
        return PoolingParams(**given)
    except (TypeError, AttributeError) as error:
        raise InvalidRequest(f"pooling_params={shortened(given)}: {error}") from None


def prompt_of(row: Row, *, prefers_text: bool) -> dict[str, Any]:
    """A row's prompt, without its conversation. Raises InvalidRequest if it has none.

    `prefers_text`: whether text counts for more than the row's tokens.
    """
    text, tokens = row.get("prompt"), row.get("tokenized_prompt")
    images = {name: row[column] for column, name in IMAGE_COLUMNS.items() if row.get(column) is not None}
    if tokens is not None and not (prefers_text and text):
        return {"prompt_token_ids": tokens, **({"prompt": text} if text else {}), **images}
    if text is None:
        raise InvalidRequest("a row needs one of the columns messages, prompt and tokenized_prompt")
    return {"prompt": text, **images}


def failed(row: Row, error: str, **known: Any) -> Row:
    """What a row gets that failed."""
    prompt = row.get("prompt")
    text = prompt[:_MAX_PROMPT_IN_ERROR] if isinstance(prompt, str) else ""
    return {**DEFAULTS, **known, "prompt": text, ERROR: error}


def succeeded(output: RequestOutput, **known: Any) -> Row:
    """What a row gets whose request generated."""
    first = output.outputs[0]
    return {
        **DEFAULTS,
        **_of_any(output),
        "generated_tokens": first.token_ids,
        "generated_text": first.text,
        "num_generated_tokens": len(first.token_ids),
        "logprobs": _logprobs(first),
        "prompt_logprobs": output.prompt_logprobs and [_as_dicts(each) for each in output.prompt_logprobs],
        **known,
    }


def pooled(output: Any, **known: Any) -> Row:
    """What a row gets whose request pooled. `output`: a `PooledOutput`."""
    return {**DEFAULTS, **_of_any(output), "embeddings": output.result().outputs.data, **known}


def _of_any(output: RequestOutput) -> Row:
    metrics = output.metrics
    return {
        "prompt": output.prompt or "",
        "prompt_token_ids": output.prompt_token_ids,
        "num_input_tokens": len(output.prompt_token_ids),
        "metrics": None if metrics is None else {name: getattr(metrics, name) for name in _METRICS},
        "time_taken_llm": 0.0 if metrics is None else (metrics.finished_s or metrics.arrival_s) - metrics.arrival_s,
    }


def _logprobs(output: CompletionOutput) -> list[dict[int, Row] | None] | None:
    return None if output.logprobs is None else [_as_dicts(each) for each in output.logprobs]


def _as_dicts(position: Mapping[int, Logprob] | None) -> dict[int, Row] | None:
    if position is None:
        return None
    return {token: dataclasses.asdict(each) for token, each in position.items()}
