"""What requests that pool ask for: parameters, checked and completed with what the model does by default. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, get_args

import msgspec

from raycore.errors import InvalidRequest
from raycore.json_fields import shortened
from raycore.parts.pooling.client.pooling_params import resolved_pooling_params
from raycore.parts.pooling.models.pooling import PoolingSpec
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
    """Return a copy of a request's parameters that leaves nothing open but `use_activation`.

    Args:
        params: None: the model's defaults.
        task: what the caller asks for. None: the task of `params`, or else the model's default.

    Raises:
        InvalidRequest: a parameter is invalid, or the model doesn't support it. The message names it.
    """
    given: Any = PoolingParams() if params is None else params  # users may pass anything
    if not isinstance(given, PoolingParams):
        raise InvalidRequest(f"pooling_params={shortened(given)} isn't PoolingParams")
    if given.task is not None and task is not None and given.task != task:
        raise InvalidRequest(f"task={given.task!r} in pooling_params, but {task!r} is asked for: omit it")
    chosen = task or given.task
    if chosen is not None:
        given = msgspec.structs.replace(given, task=_task(chosen, pooling))
    return resolved_pooling_params(pooling, given)


def _task(task: str, pooling: PoolingSpec) -> PoolingTask:
    for known in pooling.tasks:
        if task == known:
            return known
    if task not in TASKS:
        raise InvalidRequest(f"task={shortened(task)} isn't one of {', '.join(map(repr, TASKS))}")
    advice = ""
    if task in ("embed", "token_embed"):
        advice = ': for embeddings, start another engine, as LLM(model, runner="pooling", convert="embed")'
    elif task == "score" and pooling.num_labels > 1:
        advice = f": it has {pooling.num_labels} classes, and a score is the only class of a model"
    raise InvalidRequest(f"task={task!r} isn't supported by this model, which has {_listed(pooling)}{advice}")


def _listed(pooling: PoolingSpec) -> str:
    return ", ".join(map(repr, pooling.tasks))
