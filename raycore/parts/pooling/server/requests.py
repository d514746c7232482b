"""Prepares the requests that pool, for the HTTP server and for batches, and makes their responses."""

from __future__ import annotations

import json
import uuid
from typing import Any

import msgspec
import numpy as np

from raycore.parts.pooling.server.encoding import Floats, as_base64, as_bytes, as_json, metadata
from raycore.parts.pooling.server.parameters import checked_task, params_for, spec_of
from raycore.parts.pooling.server.pooled import Answer, BytesAnswer, PoolingJob, Result, as_prompts
from raycore.parts.pooling.server.prompts import check_prompts, input_prompts
from raycore.parts.pooling.server.protocol import ClassificationRequest, EmbeddingRequest, Encoded, PoolingRequest
from raycore.server.generation import ServingEngine
from raycore.server.models import Models
from raycore.server.options import ServerOptions
from raycore.server.protocol import Routed


def prepare_embedding(
    engine: ServingEngine, body: EmbeddingRequest, options: ServerOptions, models: Models
) -> PoolingJob:
    """Check and prepare a request for embeddings. Raises APIError if the request is invalid."""
    model, params = models.find(body.model), params_for(engine, body, "embed")
    prompts = input_prompts(engine, body, options)
    check_prompts(engine, prompts, params, _given(body))
    return PoolingJob(engine, body, model, new_id("embd", body), as_prompts(prompts, body), params, _embeddings)


def prepare_classification(
    engine: ServingEngine, body: ClassificationRequest, options: ServerOptions, models: Models
) -> PoolingJob:
    """Check and prepare a request for classes. Raises APIError if the request is invalid."""
    model, params = models.find(body.model), params_for(engine, body, "classify")
    prompts = input_prompts(engine, body, options)
    check_prompts(engine, prompts, params, _given(body))
    return PoolingJob(engine, body, model, new_id("classify", body), as_prompts(prompts, body), params, _classes)


def prepare_pooling(engine: ServingEngine, body: PoolingRequest, options: ServerOptions, models: Models) -> PoolingJob:
    """Check and prepare a request for any of the model's tasks. Raises APIError if the request is invalid."""
    model, params = models.find(body.model), params_for(engine, body, checked_task(engine, body.task))
    prompts = input_prompts(engine, body, options)
    check_prompts(engine, prompts, params, _given(body))
    return PoolingJob(engine, body, model, new_id("pooling", body), as_prompts(prompts, body), params, _numbers)


def new_id(prefix: str, body: Routed) -> str:
    """The id of a request to the engine and of its response."""
    return f"{prefix}-{body.request_id or uuid.uuid4().hex}"


def _given(body: EmbeddingRequest | ClassificationRequest) -> str:
    return "messages" if body.input is None else "input"


def _embeddings(pooled: PoolingJob, results: list[Result]) -> Answer:
    return _encoded(pooled, results, "embedding", "embedding")


def _numbers(pooled: PoolingJob, results: list[Result]) -> Answer:
    return _encoded(pooled, results, "pooling", "data")


def _encoded(pooled: PoolingJob, results: list[Result], kind: str, field: str) -> Answer:
    """The response with all numbers. `kind` and `field`: what an entry's object is called, and its numbers."""
    request = pooled.request
    assert isinstance(request, Encoded)
    numbers = [result.outputs.data for result in results]
    if request.encoding_format in ("bytes", "bytes_only"):
        return _bytes(pooled, request, numbers, results)
    data = [{"index": index, "object": kind, field: _in_json(request, each)} for index, each in enumerate(numbers)]
    return pooled.around("list", data, results)


def _in_json(request: Encoded, data: Floats) -> msgspec.Raw:
    if request.encoding_format == "base64":
        return as_base64(data, request.embed_dtype, request.endianness)
    return as_json(data)


def _bytes(pooled: PoolingJob, request: Encoded, numbers: list[Floats], results: list[Result]) -> BytesAnswer:
    body = b"".join(as_bytes(each, request.embed_dtype, request.endianness) for each in numbers)
    headers: dict[str, str] = {}
    if request.encoding_format == "bytes":
        told: dict[str, Any] = pooled.around(
            "list", metadata(numbers, request.embed_dtype, request.endianness), results
        )
        told["usage"] = {name: told["usage"][name] for name in ("prompt_tokens", "total_tokens")}
        headers["metadata"] = json.dumps(told)  # a header is ASCII
    return BytesAnswer(body, headers=headers)


def _classes(pooled: PoolingJob, results: list[Result]) -> Answer:
    labels = spec_of(pooled.engine).labels
    data: list[dict[str, Any]] = []
    for index, result in enumerate(results):
        probs = result.outputs.data
        best = int(np.argmax(probs))
        data.append(
            {
                "index": index,
                "label": labels[best] if best < len(labels) else None,
                "probs": as_json(probs),
                "num_classes": len(probs),
            }
        )
    return pooled.around("list", data, results)
