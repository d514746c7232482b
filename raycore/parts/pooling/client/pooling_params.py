"""Completes and checks the parameters of requests that pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, get_args

import msgspec

from raycore.errors import InvalidRequest
from raycore.json_fields import shortened
from raycore.parts.pooling.models.pooling import PoolingSpec
from raycore.pooling_params import InputType, PoolingParams
from raycore.sampling_params import checked_int, json_like

_NUM_NAMED = 20
"""Numbers of dimensions in an error message."""
_OF_EMBEDDINGS = ("embed", "token_embed")


def resolved_pooling_params(spec: PoolingSpec, params: PoolingParams | None) -> PoolingParams:
    """Return a copy in which nothing is left to the model's defaults, except `use_activation`.

    Raises:
        InvalidRequest: the model can't follow the parameters. The message begins with the parameter's name.
    """
    given = PoolingParams() if params is None else params
    task = spec.tasks[0] if given.task is None else given.task
    if task not in spec.tasks:
        raise InvalidRequest(f"task={shortened(task)} isn't supported by this model: it has {', '.join(spec.tasks)}")
    activation: Any = given.use_activation  # users may pass anything
    if activation is not None and not isinstance(activation, bool):
        raise InvalidRequest(f"use_activation={shortened(activation)} isn't True, False or None")
    if given.input_type not in (None, *get_args(InputType)):
        raise InvalidRequest(f"input_type={shortened(given.input_type)} isn't 'query', 'document' or None")
    if given.input_type is not None and spec.late is None:
        raise InvalidRequest(f"input_type={given.input_type!r}, but this model treats all texts alike: omit it")
    extra = None if given.extra_kwargs is None else json_like("extra_kwargs", given.extra_kwargs)
    return msgspec.structs.replace(
        given,
        task=task,
        extra_kwargs=extra,
        dimensions=_dimensions(spec, given, task),
        step_tag_id=_step_tag_id(spec, given, task),
        returned_token_ids=_returned_token_ids(spec, given, task),
        skip_reading_prefix_cache=spec.needs_all_tokens(task),
    )


def _dimensions(spec: PoolingSpec, params: PoolingParams, task: str) -> int | None:
    if params.dimensions is None:
        return spec.dimensions if task in _OF_EMBEDDINGS else None
    dimensions = checked_int("dimensions", params.dimensions)
    if task not in _OF_EMBEDDINGS:
        raise InvalidRequest(f"dimensions={dimensions}, but task={task!r} has no embeddings: omit it")
    if not 1 <= dimensions <= spec.embedding_size:
        raise InvalidRequest(f"dimensions={dimensions} isn't in [1, {spec.embedding_size}]")
    if not spec.is_matryoshka:
        raise InvalidRequest(
            f"dimensions={dimensions}, but the beginning of this model's embeddings isn't an embedding, as far as its "
            'checkpoint says. If it is, start the engine with hf_overrides={"is_matryoshka": true}'
        )
    allowed = spec.matryoshka_dimensions
    if allowed is not None and dimensions not in allowed:
        named = ", ".join([*map(str, allowed[:_NUM_NAMED]), *(["…"] if len(allowed) > _NUM_NAMED else [])])
        raise InvalidRequest(f"dimensions={dimensions} isn't one of those that this model was trained for: {named}")
    return dimensions


def _step_tag_id(spec: PoolingSpec, params: PoolingParams, task: str) -> int | None:
    if params.step_tag_id is None:
        return spec.step_tag_id if task == "token_classify" else None
    if task != "token_classify":
        raise InvalidRequest(f"step_tag_id={shortened(params.step_tag_id)}, but task={task!r} isn't 'token_classify'")
    return checked_int("step_tag_id", params.step_tag_id)


def _returned_token_ids(spec: PoolingSpec, params: PoolingParams, task: str) -> list[int] | None:
    given: Any = params.returned_token_ids  # users may pass anything
    if given is None:
        return spec.returned_token_ids if task == "token_classify" else None
    if task != "token_classify":
        raise InvalidRequest(f"returned_token_ids={shortened(given)}, but task={task!r} isn't 'token_classify'")
    listed = cast("Sequence[Any]", given) if isinstance(given, Sequence) and not isinstance(given, str) else ()
    if not listed:
        raise InvalidRequest(f"returned_token_ids={shortened(params.returned_token_ids)} isn't a list of classes")
    columns = [checked_int("returned_token_ids", each) for each in listed]
    if spec.class_tokens is not None:
        other = next((each for each in columns if each not in spec.class_tokens), None)
        if other is not None:
            raise InvalidRequest(f"returned_token_ids contains {other}, which isn't a class of this model")
        return columns
    bad = next((each for each in columns if not 0 <= each < spec.num_labels), None)
    if bad is not None:
        raise InvalidRequest(f"returned_token_ids contains {bad}, which isn't in [0, {spec.num_labels})")
    return columns
