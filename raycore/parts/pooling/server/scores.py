"""The endpoints that score pairs of texts, and rank documents.

A model with one class reads both texts of a pair in one prompt. Another one makes an embedding of each text, or of each
token. Then the score says how similar these are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from raycore.parts.pooling.server.parameters import params_for, spec_of
from raycore.parts.pooling.server.pooled import Answer, PoolingJob, Result, as_prompts, usage, with_salt
from raycore.parts.pooling.server.prompts import (
    Cut,
    check_count,
    check_length,
    check_prompts,
    document_text,
    text_prompts,
)
from raycore.parts.pooling.server.protocol import Documents, RerankRequest, ScoreRequest, ScoringRequest
from raycore.parts.pooling.server.responses import RerankAnswer, ScoreAnswer
from raycore.pooling_params import PoolingParams
from raycore.server.contract.engine import ServingEngine
from raycore.server.contract.handlers import runs
from raycore.server.contract.service import Context
from raycore.server.http.errors import APIError
from raycore.server.options import ServerOptions
from raycore.text.pairs import PairFormat, cosine, max_similarity, pair_prompts

ScoringTask = Literal["score", "embed", "token_embed"]
_NAMES = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))
"""The fields of a score request that name its texts, as vLLM has them."""


@dataclass(frozen=True)
class _Texts:
    """The two sides of a request's pairs: N and N texts, or 1 and N."""

    first: list[str]
    second: list[str]
    names: tuple[str, str]
    """The fields that have the texts."""

    def pairs(self) -> list[tuple[str, str]]:
        first = self.first * len(self.second) if len(self.first) == 1 else self.first
        return list(zip(first, self.second, strict=True))


def scoring_task(tasks: Sequence[str]) -> ScoringTask | None:
    """The one of a model's tasks that scores are made with; None if it can't score."""
    found: tuple[ScoringTask, ...] = ("score", "embed", "token_embed")
    return next((task for task in found if task in tasks), None)


@runs(ScoreAnswer, name="pool")
def score(context: Context, body: ScoreRequest) -> PoolingJob:
    """Score pairs of texts."""
    given = {name for name in body.model_fields_set if name in {name for names in _NAMES for name in names}}
    names = next((names for names in _NAMES if given == set(names)), None)
    if names is None or getattr(body, names[0]) is None or getattr(body, names[1]) is None:
        expected = ", or ".join(" and ".join(names) for names in _NAMES)
        raise APIError(400, f"give exactly two lists of texts: {expected}", param=min(given, default="text_1"))
    first, second = (_texts(getattr(body, name), name) for name in names)
    texts = _Texts(first, second, names)
    return _prepare(context, body, texts, _score_response)


@runs(RerankAnswer, name="pool")
def rerank(context: Context, body: RerankRequest) -> PoolingJob:
    """Rank documents by how well they fit a query."""
    if body.top_n < 0:
        raise APIError(400, f"top_n={body.top_n} isn't at least 0", param="top_n")
    texts = _Texts([document_text(body.query, "query")], _texts(body.documents, "documents"), ("query", "documents"))
    respond = partial(_ranking, body=body, documents=texts.second)
    return _prepare(context, body, texts, respond)


score_v1, rerank_v1, rerank_v2 = score, rerank, rerank


def _prepare(
    context: Context,
    body: ScoringRequest,
    texts: _Texts,
    respond: Callable[[PoolingJob, list[Result], list[float]], Answer],
) -> PoolingJob:
    engine, options = context.engine, context.options
    for side, name in zip((texts.first, texts.second), texts.names, strict=True):
        check_count(len(side), name, options)
    if len(texts.first) not in (1, len(texts.second)):
        first, second = texts.names
        raise APIError(
            400,
            f"{first} has {len(texts.first)} entries and {second} {len(texts.second)}: give one and many, or as many",
            param=first,
        )
    task = scoring_task(spec_of(engine).tasks)
    assert task is not None, "these endpoints are served only for models that can score"
    model, params = context.models.find(body.model), params_for(engine, body, task)
    request_id = context.new_id("score", body)
    if task == "score":
        prompts = _pairs(engine, body, texts, params, options)
        return PoolingJob(context, body, model, request_id, prompts, params, partial(_of_pairs, respond=respond))
    prompts = _each_text(engine, body, texts, params)
    similar = cosine if task == "embed" else max_similarity
    of_texts = partial(_of_texts, respond=respond, num_first=len(texts.first), similar=similar)
    return PoolingJob(context, body, model, request_id, prompts, params, of_texts)


def _texts(given: Documents, name: str) -> list[str]:
    if isinstance(given, list):
        return [document_text(each, f"{name}[{index}]") for index, each in enumerate(given)]
    return [document_text(given, name)]


def _pairs(
    engine: ServingEngine, body: ScoringRequest, texts: _Texts, params: PoolingParams, options: ServerOptions
) -> list[dict[str, Any]]:
    cut, limits = _cut(engine, body), _limits(engine, body)
    kwargs = dict(body.chat_template_kwargs or {})
    if body.instruction is not None:
        kwargs.setdefault("instruction", body.instruction)
    if kwargs and options.chat_template is None:
        name = "instruction" if body.instruction is not None else "chat_template_kwargs"
        raise APIError(400, f"{name}: this server has no score template; give it one with --chat-template", param=name)
    asked = PairFormat(
        spec_of(engine).pairs == "pair", options.chat_template, kwargs, *limits, cut.max_tokens, cut.side
    )
    prompts: list[dict[str, Any]] = []
    for index, prompt in enumerate(pair_prompts(engine.get_tokenizer(), texts.pairs(), asked)):
        where = f"{texts.names[1]}[{index}]"
        if not prompt["prompt_token_ids"]:
            raise APIError(400, f"the pair with {where} has no tokens", param=texts.names[1])
        check_length(engine, prompt["prompt_token_ids"], f"the pair with {where}", texts.names[1])
        prompts.append(prompt)
    check_prompts(engine, [prompt["prompt_token_ids"] for prompt in prompts], params, texts.names[1])
    return [with_salt(prompt, body) for prompt in prompts]


def _each_text(
    engine: ServingEngine, body: ScoringRequest, texts: _Texts, params: PoolingParams
) -> list[dict[str, Any]]:
    if body.instruction is not None or body.chat_template_kwargs:
        name = "instruction" if body.instruction is not None else "chat_template_kwargs"
        raise APIError(400, f"{name}: this model's scores compare embeddings, without a template", param=name)
    cut, tokenizer = _cut(engine, body), engine.get_tokenizer()
    all_prompts: list[dict[str, Any]] = []
    kinds = spec_of(engine).kinds
    sides = zip((texts.first, texts.second), texts.names, _limits(engine, body), kinds, strict=True)
    for side, name, limit, kind in sides:
        shorter = side if limit is None else [tokenizer.cut(text, limit) for text in side]
        prompts = text_prompts(engine, shorter, name, cut, kind)
        check_prompts(engine, prompts, params, name)
        all_prompts += as_prompts(prompts, body)
    return all_prompts


def _cut(engine: ServingEngine, body: ScoringRequest) -> Cut:
    return Cut.of(engine, body.truncate_prompt_tokens, body.truncation_side, "truncate_prompt_tokens")


def _limits(engine: ServingEngine, body: ScoringRequest) -> tuple[int | None, int | None]:
    """How many tokens the texts of the first and the second side may have."""
    for name in ("max_tokens_per_query", "max_tokens_per_doc"):
        value = getattr(body, name)
        if not 0 <= value < engine.max_model_len:
            raise APIError(400, f"{name}={value} isn't in [0, {engine.max_model_len - 1}]", param=name)
    return body.max_tokens_per_query or None, body.max_tokens_per_doc or None


def _of_pairs(
    pooled: PoolingJob, results: list[Result], *, respond: Callable[[PoolingJob, list[Result], list[float]], Answer]
) -> Answer:
    return respond(pooled, results, [float(result.outputs.data[0]) for result in results])


def _of_texts(
    pooled: PoolingJob,
    results: list[Result],
    *,
    respond: Callable[[PoolingJob, list[Result], list[float]], Answer],
    num_first: int,
    similar: Callable[[Any, Any], float],
) -> Answer:
    first, second = results[:num_first], results[num_first:]
    pairs = zip(first * len(second) if num_first == 1 else first, second, strict=True)
    return respond(pooled, results, [similar(a.outputs.data, b.outputs.data) for a, b in pairs])


def _score_response(pooled: PoolingJob, results: list[Result], scores: list[float]) -> Answer:
    data: list[dict[str, Any]] = [
        {"index": index, "object": "score", "score": score} for index, score in enumerate(scores)
    ]
    return pooled.around("list", data, results)


def _ranking(
    pooled: PoolingJob, results: list[Result], scores: list[float], *, body: RerankRequest, documents: list[str]
) -> Answer:
    # equal scores stay in order, and what isn't a number comes last
    best = sorted(range(len(scores)), key=lambda index: math.inf if math.isnan(scores[index]) else -scores[index])
    ranked: list[dict[str, Any]] = []
    for index in best[: body.top_n or None]:
        document = {"document": {"text": documents[index]}} if body.return_documents else {}
        ranked.append({"index": index, **document, "relevance_score": scores[index]})
    used = usage(results)
    return {
        "id": pooled.id,
        "model": pooled.model.name,
        "usage": {name: used[name] for name in ("prompt_tokens", "total_tokens")},
        "results": ranked,
    }
