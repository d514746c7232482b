"""What requests that pool ask for: parameters, checked and completed with what the model does by default. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, get_args

import msgspec

from raycore.checkpoint.json_fields import shortened
from raycore.errors import InvalidRequest
from raycore.models.pooling import PoolingSpec
from raycore.plain_errors import decode_problem
from raycore.pooling_params import PoolingParams, PoolingTask
from raycore.sampling_params import SamplingParams

PLACEHOLDER = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
"""The sampling parameters of requests that pool: the one token that they get stands for the result."""
TASKS: tuple[PoolingTask, ...] = get_args(PoolingTask)
GENERATE = "generate"


def supported_tasks(pooling: PoolingSpec | None) -> tuple[str, ...]:
    """The tasks of a model, the default first. None: the model generates."""
    return (GENERATE,) if pooling is None else tuple(pooling.tasks)


def not_pooling(task: str | None) -> InvalidRequest:
    """The error of a request that pools, on an engine that generates."""
    asked = "pooling" if task is None else f"the task {task!r}"
    convert = ', convert="classify"' if task in ("classify", "score", "token_classify") else ""
    return InvalidRequest(
        f"this engine supports only the task 'generate', not {asked}: for that, start another one, as "
        f'LLM(model, runner="pooling"{convert}) or `raycore serve MODEL --runner pooling`'
    )


def not_generating(pooling: PoolingSpec) -> InvalidRequest:
    """The error of a request that generates, on an engine that pools."""
    return InvalidRequest(
        f"this engine pools, and supports only the tasks {_listed(pooling)}, not 'generate': use encode(), embed(), "
        'classify() or score(), or start another engine, as LLM(model, runner="generate")'
    )


def pooling_for_each(
    params: PoolingParams | Sequence[PoolingParams] | None, count: int
) -> Sequence[PoolingParams | None]:
    """The pooling parameters of each of `count` prompts.

    Raises:
        InvalidRequest: `params` is a list of another length than `count`, or something else.
    """
    given: Any = params  # users may pass anything
    if given is None or isinstance(given, PoolingParams):
        return [given] * count
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise InvalidRequest(f"pooling_params={shortened(given)} isn't PoolingParams")
    each = list(cast("Sequence[PoolingParams]", given))
    if len(each) != count:
        raise InvalidRequest(f"{len(each)} pooling_params for {count} prompts: give one, or one for each")
    return each


def resolved(params: PoolingParams | None, task: str | None, pooling: PoolingSpec) -> PoolingParams:
    """Return a copy of a request's parameters that leaves nothing open.

    Args:
        params: None: the model's defaults.
        task: what the caller asks for. None: the task of `params`, or else the model's default.

    Raises:
        InvalidRequest: a parameter is invalid, or the model doesn't support it. The message names it.
    """
    given = _checked(params)
    if given.task is not None and task is not None and given.task != task:
        raise InvalidRequest(f"pooling_params have task={given.task!r}, but {task!r} is asked for: omit the task")
    chosen = _task(task or given.task or pooling.tasks[0], pooling)
    is_embedding, has_steps = chosen in ("embed", "token_embed"), pooling.token == "STEP"
    if given.dimensions is not None and not is_embedding:
        raise InvalidRequest(f"dimensions={given.dimensions} is for embeddings, not for the task {chosen!r}: omit it")
    for name in ("step_tag_id", "returned_token_ids"):
        if getattr(given, name) is not None and not (chosen == "token_classify" and has_steps):
            raise InvalidRequest(
                f"{name}={shortened(getattr(given, name))} is for the task 'token_classify' of models that have "
                'pooler_config={"tok_pooling_type": "STEP"}: omit it'
            )
    use_activation = pooling.use_activation if given.use_activation is None else given.use_activation
    steps = chosen == "token_classify" and has_steps
    return PoolingParams(
        task=chosen,
        use_activation=use_activation,
        dimensions=_dimensions(given.dimensions or pooling.dimensions, pooling) if is_embedding else None,
        step_tag_id=(pooling.step_tag_id if given.step_tag_id is None else given.step_tag_id) if steps else None,
        returned_token_ids=_columns(given.returned_token_ids, pooling) if steps else None,
        skip_reading_prefix_cache=pooling.needs_all_tokens(chosen),
    )


def _checked(params: PoolingParams | None) -> PoolingParams:
    if params is None:
        return PoolingParams()
    given: Any = params  # users may pass anything
    if not isinstance(given, PoolingParams):
        raise InvalidRequest(f"pooling_params={shortened(given)} isn't PoolingParams")
    try:
        return msgspec.convert(msgspec.to_builtins(given), PoolingParams)
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidRequest(f"pooling_params: {decode_problem(error)}") from None


def _task(task: str, pooling: PoolingSpec) -> PoolingTask:
    for known in pooling.tasks:
        if task == known:
            return known
    if task not in TASKS:
        raise InvalidRequest(f"the task {shortened(task)} isn't one of {', '.join(map(repr, TASKS))}")
    advice = ""
    if task in ("embed", "token_embed"):
        advice = ': for embeddings, start another engine, as LLM(model, runner="pooling", convert="embed")'
    elif task == "score" and pooling.num_labels > 1:
        advice = f": it has {pooling.num_labels} classes, and a score is the only class of a model"
    raise InvalidRequest(f"this model supports the tasks {_listed(pooling)}, not {task!r}{advice}")


def _dimensions(asked: int | None, pooling: PoolingSpec) -> int | None:
    if asked is None or asked == pooling.embedding_size:
        return asked
    if not pooling.is_matryoshka:
        raise InvalidRequest(
            f"dimensions={asked}, but the model isn't known to have embeddings that can be shortened: omit it, or "
            'start the engine with hf_overrides={"is_matryoshka": true} if it has'
        )
    if asked > pooling.embedding_size:
        raise InvalidRequest(
            f"dimensions={asked} is above the size of the model's embeddings, which is {pooling.embedding_size}"
        )
    known = pooling.matryoshka_dimensions
    if known is not None and asked not in known:
        raise InvalidRequest(f"dimensions={asked} isn't one of the model's: {', '.join(map(str, known))}")
    return asked


def _columns(asked: list[int] | None, pooling: PoolingSpec) -> list[int] | None:
    chosen = asked or pooling.returned_token_ids
    if not chosen:
        return None
    tokens = pooling.class_tokens
    if tokens is None:
        tokens = list(range(pooling.num_labels))
    unknown = [token for token in chosen if token not in tokens]
    if unknown:
        raise InvalidRequest(
            f"returned_token_ids has {unknown[0]}, which isn't one of the model's classes: "
            f"{', '.join(map(str, tokens))}"
        )
    return [tokens.index(token) for token in chosen]


def _listed(pooling: PoolingSpec) -> str:
    return ", ".join(map(repr, pooling.tasks))
