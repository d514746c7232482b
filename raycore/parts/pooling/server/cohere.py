"""Cohere's endpoint for embeddings."""

from __future__ import annotations

from typing import Any

from raycore.parts.pooling.server.encoding import as_base64, as_json, packed_bits
from raycore.parts.pooling.server.parameters import check_fields, params_of, spec_of
from raycore.parts.pooling.server.pooled import Answer, PoolingJob, Result, as_prompts, usage
from raycore.parts.pooling.server.prompts import Cut, check_count, check_prompts, parts_text, text_prompts
from raycore.parts.pooling.server.protocol import CohereEmbedRequest
from raycore.parts.pooling.server.responses import CohereEmbedAnswer
from raycore.server.contract.engine import ServingEngine
from raycore.server.contract.handlers import runs
from raycore.server.contract.service import Context
from raycore.server.http.errors import APIError


@runs(CohereEmbedAnswer, name="pool")
def cohere_embed(context: Context, body: CohereEmbedRequest) -> PoolingJob:
    """Compute embeddings, as Cohere's API."""
    check_fields(body)
    engine, model = context.engine, context.models.find(body.model)
    params = params_of(engine, "embed", body.output_dimension, dimensions_param="output_dimension")
    if (body.texts is None) == (body.inputs is None):
        raise APIError(400, "give exactly one of texts and inputs", param="texts")
    texts, param = body.texts, "texts"
    if texts is None:
        assert body.inputs is not None
        texts, param = [parts_text(each.content, f"inputs[{i}]") for i, each in enumerate(body.inputs)], "inputs"
    check_count(len(texts), param, context.options)
    _check_types(body, body.output_dimension or spec_of(engine).dimensions or spec_of(engine).embedding_size)
    prefix = _prefix(engine, body.input_type)
    prompts = text_prompts(engine, [prefix + text for text in texts], param, _cut(engine, body))
    _check_lengths(prompts, body, param)
    check_prompts(engine, prompts, params, param)
    return PoolingJob(
        context, body, model, context.new_id("embd", body), as_prompts(prompts, body), params, _embeddings
    )


def _prefix(engine: ServingEngine, input_type: str | None) -> str:
    """What the checkpoint wants before texts of this type."""
    if input_type is None:
        return ""
    named = engine.named_prompts
    if input_type not in named:
        known = f"use {' or '.join(map(repr, sorted(named)))}" if named else "its checkpoint has no prompts: omit it"
        raise APIError(400, f"input_type={input_type!r} is not supported by this model: {known}", param="input_type")
    return named[input_type]


def _cut(engine: ServingEngine, body: CohereEmbedRequest) -> Cut:
    if body.max_tokens is not None and body.max_tokens < 1:
        raise APIError(400, f"max_tokens={body.max_tokens} isn't at least 1", param="max_tokens")
    if body.truncate == "NONE":
        return Cut(None)
    most = -1 if body.max_tokens is None else min(body.max_tokens, engine.max_model_len)
    return Cut.of(engine, most, "left" if body.truncate == "START" else "right", "max_tokens")


def _check_lengths(prompts: list[list[int]], body: CohereEmbedRequest, param: str) -> None:
    if body.truncate != "NONE" or body.max_tokens is None:
        return
    for index, token_ids in enumerate(prompts):
        if len(token_ids) > body.max_tokens:
            raise APIError(
                400,
                f"{param}[{index}] has {len(token_ids)} tokens, more than max_tokens={body.max_tokens}, and "
                "truncate='NONE'",
                param=param,
            )


def _check_types(body: CohereEmbedRequest, size: int) -> None:
    binary = next((kind for kind in body.embedding_types or () if kind in ("binary", "ubinary")), None)
    if binary is not None and size % 8:
        raise APIError(
            400,
            f"embedding_types={binary!r} packs 8 elements into a byte, but embeddings have {size}: set "
            "output_dimension to a multiple of 8",
            param="embedding_types",
        )


def _embeddings(pooled: PoolingJob, results: list[Result]) -> Answer:
    request = pooled.request
    assert isinstance(request, CohereEmbedRequest)
    numbers = [result.outputs.data for result in results]
    embeddings: dict[str, list[Any]] = {}
    for kind in request.embedding_types or ["float"]:
        if kind == "float":
            embeddings[kind] = [as_json(each) for each in numbers]
        elif kind == "base64":
            embeddings[kind] = [as_base64(each, "float32", "little") for each in numbers]
        else:
            embeddings[kind] = [packed_bits(each, is_signed=kind == "binary") for each in numbers]
    billed = {"input_tokens": usage(results)["prompt_tokens"], "image_tokens": 0}
    return {
        "id": pooled.id,
        "embeddings": embeddings,
        **({} if request.texts is None else {"texts": request.texts}),
        "meta": {"api_version": {"version": "2"}, "billed_units": billed},
        "response_type": "embeddings_by_type",
    }
