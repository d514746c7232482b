"""The endpoints for embeddings, classes, and any of a model's tasks."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from raycore.parts.pooling.server.encoding import Floats, as_base64, as_bytes, as_json, metadata
from raycore.parts.pooling.server.parameters import checked_task, params_for, spec_of
from raycore.parts.pooling.server.pooled import Answer, BytesAnswer, PoolingJob, Result, as_prompts
from raycore.parts.pooling.server.prompts import check_prompts, input_prompts
from raycore.parts.pooling.server.protocol import ClassificationRequest, EmbeddingRequest, Encoded, PoolingRequest
from raycore.parts.pooling.server.responses import ClassificationAnswer, EmbeddingAnswer, PoolingAnswer
from raycore.pooling_params import PoolingTask
from raycore.server.contract.handlers import runs
from raycore.server.contract.service import Context

_BYTES = {BytesAnswer.media_type: {"schema": {"type": "string", "format": "binary"}}}


@runs(EmbeddingAnswer, name="pool", content=_BYTES)
def embeddings(context: Context, body: EmbeddingRequest) -> PoolingJob:
    """Compute embeddings of inputs."""
    return _prepared(context, body, "embed", "embd", _embeddings)


@runs(ClassificationAnswer, name="pool")
def classify(context: Context, body: ClassificationRequest) -> PoolingJob:
    """Classify inputs."""
    return _prepared(context, body, "classify", "classify", _classes)


@runs(PoolingAnswer, name="pool", content=_BYTES)
def pooling(context: Context, body: PoolingRequest) -> PoolingJob:
    """Run one of the model's tasks on inputs."""
    context.models.find(body.model)  # an unknown model is told before an unknown task
    return _prepared(context, body, checked_task(context.engine, body.task), "pooling", _numbers)


def _prepared(
    context: Context,
    body: EmbeddingRequest | ClassificationRequest,
    task: PoolingTask,
    prefix: str,
    respond: Callable[[PoolingJob, list[Result]], Answer],
) -> PoolingJob:
    """Check and prepare a request. `prefix`: of its id."""
    engine, model = context.engine, context.models.find(body.model)
    params = params_for(engine, body, task)
    prompts = input_prompts(engine, body, context.options, params.input_type)
    check_prompts(engine, prompts, params, "messages" if body.input is None else "input")
    return PoolingJob(context, body, model, context.new_id(prefix, body), as_prompts(prompts, body), params, respond)


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
    labels = spec_of(pooled.context.engine).labels
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
