"""Pooling parameters of requests, and the fields that this server doesn't support."""

from __future__ import annotations

from typing import Any

from raycore.errors import InvalidRequest
from raycore.parts.pooling.client.pooling import resolved
from raycore.parts.pooling.models.pooling import PoolingSpec
from raycore.parts.pooling.server.protocol import EmbeddingRequest, PoolingFields, PoolingRequest
from raycore.pooling_params import InputType, PoolingParams, PoolingTask
from raycore.server.contract.engine import ServingEngine
from raycore.server.generation.sampling import check_documented
from raycore.server.http.errors import APIError, as_api_error
from raycore.server.protocol import Routed

ABSENT = {
    "data": "plugins that read inputs of their own aren't supported: use input or messages",
    "images": "images aren't supported here: use texts or inputs",
}
"""Fields that vLLM or Cohere document but this server doesn't support, each with the reason for its refusal."""

ONLY: dict[str, tuple[Any, ...]] = {
    "padding": ("do_not_pad",),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
}
"""Fields that are accepted only with these values, which have no effect."""


def check_fields(request: Routed) -> None:
    """Raise APIError if a field has a value that this server doesn't support."""
    check_documented(request, ABSENT, ONLY)


def params_for(engine: ServingEngine, request: PoolingFields, task: PoolingTask | None) -> PoolingParams:
    """A request's pooling parameters. Raises APIError if one is invalid; the error names its field."""
    check_fields(request)
    use_activation, dimensions = request.use_activation, None
    if isinstance(request, EmbeddingRequest):
        dimensions = request.dimensions
        if request.normalize is not None:
            if use_activation not in (None, request.normalize):
                raise APIError(
                    400, f"normalize={request.normalize} contradicts use_activation={use_activation}", param="normalize"
                )
            use_activation = request.normalize
    input_type = request.input_type if isinstance(request, PoolingRequest) else None
    return params_of(engine, task, dimensions, use_activation=use_activation, input_type=input_type)


def params_of(
    engine: ServingEngine,
    task: PoolingTask | None,
    dimensions: int | None,
    *,
    use_activation: bool | None = None,
    input_type: InputType | None = None,
    dimensions_param: str = "dimensions",
) -> PoolingParams:
    """Pooling parameters for a model. Raises APIError if the model can't follow them.

    `dimensions_param`: the request's field with the dimensions.
    """
    size = spec_of(engine).embedding_size
    if dimensions is not None and not 1 <= dimensions <= size:
        raise APIError(400, f"{dimensions_param}={dimensions} isn't in [1, {size}]", param=dimensions_param)
    params = PoolingParams(task=task, dimensions=dimensions, use_activation=use_activation, input_type=input_type)
    try:
        resolved(params, None, spec_of(engine))
    except InvalidRequest as error:
        told = as_api_error(error)
        if told.param == "dimensions":
            told = APIError(400, f"{dimensions_param}{told.message.removeprefix('dimensions')}", param=dimensions_param)
        raise told from error
    return params


def spec_of(engine: ServingEngine) -> PoolingSpec:
    """How the engine's model pools."""
    assert engine.pooling_spec is not None, "these endpoints are served only for models that pool"
    return engine.pooling_spec


def checked_task(engine: ServingEngine, task: str | None) -> PoolingTask:
    """The task that a request names; without one, the model's first one. Raises APIError if the model hasn't got it."""
    supported = spec_of(engine).tasks
    found: PoolingTask | None = next((each for each in supported if task in (None, each)), None)
    if found is None:
        raise APIError(400, f"task={task!r} isn't one of this model's tasks: {', '.join(supported)}", param="task")
    return found
