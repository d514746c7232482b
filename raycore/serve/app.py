"""Builds an application of Ray Serve."""

# ray's own types are partial:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

from ray import serve

from raycore.errors import InvalidConfig
from raycore.serve.config import (
    ModelDeployment,
    arguments,
    checked_options,
    deployment_options,
    serving_config,
)
from raycore.serve.replica import DirectModel, Model
from raycore.serve.router import Ingress
from raycore.server.options import SERVER_OPTIONS
from raycore.server.serve_app import check_model_path
from raycore.short_tracebacks import ends_traceback


@ends_traceback
def build_openai_app(llm_serving_args: Mapping[str, Any]) -> serve.Application:
    """Build a Serve application with raycore's API for one or more models.

    Each model is a deployment, whose replicas host an engine each. A model without adapters that is alone takes
    requests itself. Otherwise a deployment before them reads which model a request names.

    Args:
        llm_serving_args: as for `ray.serve.llm.build_openai_app`; docs/ray-serve.md lists the fields.

    Raises:
        InvalidConfig: a field or an option is unknown or invalid, or a checkpoint's path doesn't exist on the only node
            of the cluster. The message names it.
    """
    config, models = serving_config(llm_serving_args)
    for index, model in enumerate(models):
        check_paths(f"llm_configs[{index}]", model)
    known = deployment_fields()
    ingress = checked_options("ingress_deployment_config", config.ingress_deployment_config, known)
    if len(models) == 1 and not ingress and models[0].adapters_path is None:
        return _deployment(DirectModel, models[0], known)
    deployments = {model.model_id: _deployment(Model, model, known) for model in models}
    adapters = {model.model_id: model.adapters_path for model in models if model.adapters_path is not None}
    options = {**_ingress_options(models), **ingress}
    if "autoscaling_config" in ingress:
        options.pop("num_replicas", None)
    router: Any = Ingress
    try:
        return router.options(**options).bind(deployments, adapters, _max_body_bytes(models))
    except (TypeError, ValueError) as error:
        raise InvalidConfig(f"ingress_deployment_config: {error}") from error


def check_paths(where: str, model: ModelDeployment) -> None:
    """See `check_model_path`. `where`: what the model's configuration is called in messages."""
    loading = model.model_loading_config
    name = "model_id" if loading.model_source is None else "model_source"
    check_model_path(f"{where}: {name}", getattr(loading, name))
    check_model_path(f"{where}: tokenizer_source", loading.tokenizer_source)


def deployment_fields() -> Collection[str]:
    """The names of the options that deployments of the installed Ray have, without those of placement groups."""
    names = inspect.signature(serve.deployment).parameters
    return [name for name in names if not name.startswith(("_", "placement_group_"))]


def _deployment(deployment: Any, model: ModelDeployment, known: Collection[str]) -> serve.Application:
    options = deployment_options(model, known)
    try:
        return deployment.options(**options).bind(arguments(model))
    except (TypeError, ValueError) as error:
        raise InvalidConfig(f"deployment_config of {model.model_id!r}: {error}") from error


def _ingress_options(models: list[ModelDeployment]) -> dict[str, Any]:
    wanted = [model.experimental_configs.get("num_ingress_replicas") for model in models]
    return {"num_replicas": max((number for number in wanted if number), default=1)}


def _max_body_bytes(models: list[ModelDeployment]) -> int:
    default = SERVER_OPTIONS["max_body_bytes"].default
    return max(model.engine_kwargs.get("max_body_bytes") or default for model in models)
