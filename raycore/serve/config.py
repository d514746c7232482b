"""What an application under Ray Serve is configured with. Names and meanings are those of `ray.serve.llm`. Pure."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from raycore.config import ENGINE_OPTIONS
from raycore.config.ray_llm import take, with_resources
from raycore.config.vllm_table import without_vllm_options
from raycore.errors import InvalidConfig
from raycore.json_fields import shortened
from raycore.options.declared import check_options, settings_of
from raycore.server.options import SERVER_OPTIONS

_MAX_LORAS = 1024
_DEFAULT_SEQS = 256
_KNOWN_EXPERIMENTS = ("num_ingress_replicas", "stream_batching_interval_ms")

_T = TypeVar("_T")


class ModelLoadingConfig(msgspec.Struct, kw_only=True, frozen=True):
    """Where a model is, and what requests call it."""

    model_id: str
    """What requests give as `model`."""
    model_source: str | dict[str, Any] | None = None
    """Directory of a checkpoint, or its name on the hub. None: the `model_id`."""
    tokenizer_source: str | None = None
    """The same for the tokenizer. None: the model's."""


class LoraConfig(msgspec.Struct, kw_only=True, frozen=True):
    """Adapters that are loaded when a request names one as `MODEL_ID:ADAPTER`."""

    dynamic_lora_loading_path: str | None = None
    """The folder that has a folder for each adapter: a directory that all nodes see, or a URI such as `s3://…`."""
    max_num_adapters_per_replica: int = 16
    download_timeout_s: float | None = 30.0
    """Seconds that a download may take. None, or not positive: no limit."""
    max_download_tries: int = 3


class ModelDeployment(msgspec.Struct, kw_only=True, frozen=True):
    """A model, its engine and its deployment."""

    model_loading_config: ModelLoadingConfig
    engine_kwargs: dict[str, Any] = {}
    """Options of the engine, and of the server: docs/options.md."""
    deployment_config: dict[str, Any] = {}
    """Options of Serve's deployment."""
    placement_group_config: dict[str, Any] | None = None
    """`bundle_per_worker`: what each worker reserves, or `bundles`: a list of that for the workers of a rank, which are
    equal. `strategy`: PACK or STRICT_PACK."""
    lora_config: LoraConfig | None = None
    accelerator_type: str | None = None
    """The type of the accelerators that the workers need, such as `H100`."""
    accelerator_config: dict[str, Any] | None = None
    """Its `kind` may be `cpu` or `gpu`. No effect: raycore uses the GPUs that it finds."""
    runtime_env: dict[str, Any] | None = None
    """The runtime environment of the replica and of the engine's processes."""
    log_engine_metrics: bool | None = True
    """Whether Ray exports the engine's metrics."""
    llm_engine: str | None = None
    """No effect."""
    experimental_configs: dict[str, Any] = {}
    """`num_ingress_replicas`: how many replicas divide requests among the models. `stream_batching_interval_ms` has no
    effect: streams aren't held back."""
    server_cls: Any = None
    """Only where `ray.serve.llm` builds the application."""
    callback_config: Any = None
    """Not supported."""

    @property
    def model_id(self) -> str:
        """What requests give as `model`."""
        return self.model_loading_config.model_id

    @property
    def adapters_path(self) -> str | None:
        """The folder of the adapters that requests may name. None: they may name none."""
        return None if self.lora_config is None else self.lora_config.dynamic_lora_loading_path


class ServingConfig(msgspec.Struct, kw_only=True, frozen=True):
    """All models of an application, and the deployment that divides requests among them."""

    llm_configs: list[Any]
    ingress_deployment_config: dict[str, Any] = {}
    """Options of Serve's deployment."""
    ingress_cls_config: dict[str, Any] = {}
    """Not supported."""


@dataclass(frozen=True)
class Arguments:
    """What a replica starts an engine and its server with."""

    server: dict[str, Any]
    engine: dict[str, Any]
    lora: LoraConfig | None
    exports_metrics: bool


def serving_config(given: Mapping[str, Any]) -> tuple[ServingConfig, list[ModelDeployment]]:
    """Read what `build_openai_app` gets. Returns its fields, and its models.

    Raises:
        InvalidConfig: a field is unknown or invalid, a file can't be read, or two models have one id.
    """
    config = _settings("build_openai_app", given, ServingConfig)
    if config.ingress_cls_config:
        raise InvalidConfig(f"ingress_cls_config={shortened(config.ingress_cls_config)} is not supported: omit it")
    if not config.llm_configs:
        raise InvalidConfig("llm_configs is empty: give at least one model")
    models = [model_config(f"llm_configs[{index}]", each) for index, each in enumerate(config.llm_configs)]
    ids = [model.model_id for model in models]
    for model_id in ids:
        if ids.count(model_id) > 1:
            raise InvalidConfig(f"llm_configs: {ids.count(model_id)} models have the model_id {model_id!r}")
    for index, model in enumerate(models):
        if model.server_cls is not None:
            raise InvalidConfig(f"llm_configs[{index}]: server_cls is for ray.serve.llm.build_openai_app: omit it")
    return config, models


def model_config(where: str, given: Any) -> ModelDeployment:
    """Read a model's configuration: a dict, the path of a YAML file, or Ray's `LLMConfig`.

    Raises:
        InvalidConfig: a field is unknown or invalid, or the file can't be read. The message begins with `where`.
    """
    if isinstance(given, str):
        where, given = f"{where} ({given})", _read_yaml(where, given)
    elif hasattr(given, "model_dump"):
        given = given.model_dump(exclude_unset=True)
    if not isinstance(given, Mapping):
        raise InvalidConfig(f"{where}={shortened(given)} isn't a dict, the path of a YAML file, or an LLMConfig")
    fields = dict(cast("Mapping[str, Any]", given))
    for name, struct in (("model_loading_config", ModelLoadingConfig), ("lora_config", LoraConfig)):
        if isinstance(fields.get(name), Mapping):
            fields[name] = msgspec.to_builtins(_settings(f"{where}: {name}", fields[name], struct))
    config = _settings(where, fields, ModelDeployment)
    _check(where, config)
    return config


def arguments(config: ModelDeployment) -> Arguments:
    """The options of a model's engine and server.

    Raises:
        InvalidConfig: an option is unknown, invalid, or contradicts the configuration. The message names it.
    """
    loading, lora = config.model_loading_config, config.lora_config
    source = loading.model_source or loading.model_id
    options = dict(config.engine_kwargs)
    take(options, "model", source, "model_source")
    take(options, "served_model_name", loading.model_id, "model_id")
    take(options, "tokenizer", loading.tokenizer_source, "tokenizer_source")
    if lora is not None:
        take(options, "enable_lora", True, "lora_config")
        number = lora.max_num_adapters_per_replica
        options["enable_lora"] = True
        options.setdefault("max_loras", min(number, _MAX_LORAS))
        options.setdefault("max_cpu_loras", max(number, options["max_loras"]))
    options = with_resources(options, config.placement_group_config, config.accelerator_type)
    known = {**ENGINE_OPTIONS, **{name: each for name, each in SERVER_OPTIONS.items() if not each.is_secret}}
    own = {name: value for name, value in options.items() if name in known}
    chosen = check_options(
        known, own | without_vllm_options({name: options[name] for name in options.keys() - own.keys()})
    )
    server = {name: value for name, value in chosen.items() if name in SERVER_OPTIONS}
    engine = {name: value for name, value in chosen.items() if name in ENGINE_OPTIONS}
    engine["model"] = source
    if loading.tokenizer_source is not None:
        engine["tokenizer"] = loading.tokenizer_source
    return Arguments({**server, "served_model_name": [loading.model_id]}, engine, lora, bool(config.log_engine_metrics))


def deployment_options(config: ModelDeployment, known: Collection[str]) -> dict[str, Any]:
    """The options of a model's deployment.

    Args:
        known: the names of the options that Serve's deployments have.

    Raises:
        InvalidConfig: an option is unknown.
    """
    given = checked_options(f"deployment_config of {config.model_id!r}", config.deployment_config, known)
    actor: dict[str, Any] = {"num_cpus": 0, **(given.get("ray_actor_options") or {})}
    if config.runtime_env is not None:
        actor["runtime_env"] = (actor.get("runtime_env") or {}) | config.runtime_env
    requests = config.engine_kwargs.get("max_concurrent_requests") or SERVER_OPTIONS["max_concurrent_requests"].default
    options: dict[str, Any] = {
        "name": f"raycore:{config.model_id.replace('/', '--')}",
        # with this limit, Serve queues the requests that the server would otherwise refuse with status 429
        "max_ongoing_requests": requests,
        **given,
        "ray_actor_options": actor,
    }
    autoscaling: Any = given.get("autoscaling_config")
    if given.get("num_replicas") == "auto" and autoscaling is None:
        autoscaling = {}
    if isinstance(autoscaling, dict):
        # as many requests as the engine computes at a time. Serve's own target is 2
        seqs = config.engine_kwargs.get("max_num_seqs") or _DEFAULT_SEQS
        target = seqs * (config.engine_kwargs.get("data_parallel_size") or 1)
        options["autoscaling_config"] = {"target_ongoing_requests": target, **cast("dict[str, Any]", autoscaling)}
    return options


def checked_options(where: str, given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Options of a deployment, none of which is unknown, or about what the engine decides itself.

    Raises:
        InvalidConfig: one is. The message begins with `where`.
    """
    for name in given:
        if name.startswith("placement_group_"):
            raise InvalidConfig(f"{where}: {name}: the engine has its own placement groups: use placement_group_config")
        if name not in known:
            raise InvalidConfig(f"{where}: unknown option {name!r}; known are {', '.join(sorted(known))}")
    return dict(given)


def _check(where: str, config: ModelDeployment) -> None:
    loading, lora = config.model_loading_config, config.lora_config
    if not loading.model_id:
        raise InvalidConfig(f"{where}: model_id is empty")
    if isinstance(loading.model_source, dict):
        raise InvalidConfig(
            f"{where}: model_source={shortened(loading.model_source)}: raycore mirrors no buckets: give a directory, "
            "or a name on the hub"
        )
    kind = (config.accelerator_config or {}).get("kind", "gpu")
    if kind not in ("cpu", "gpu"):
        raise InvalidConfig(f"{where}: accelerator_config: kind={kind!r} is not supported: use 'cpu' or 'gpu'")
    unknown = sorted(config.experimental_configs.keys() - {*_KNOWN_EXPERIMENTS})
    if unknown:
        raise InvalidConfig(
            f"{where}: experimental_configs: {unknown[0]!r} is not supported; known are {', '.join(_KNOWN_EXPERIMENTS)}"
        )
    if config.callback_config:
        raise InvalidConfig(f"{where}: callback_config={shortened(config.callback_config)} is not supported: omit it")
    if lora is not None:
        for name in ("max_num_adapters_per_replica", "max_download_tries"):
            value = getattr(lora, name)
            if value < 1:
                raise InvalidConfig(f"{where}: lora_config: {name}={value!r} isn't a positive integer")
    try:
        arguments(config)
    except InvalidConfig as error:
        raise InvalidConfig(f"{where}: {error}") from None


def _settings(where: str, given: Mapping[str, Any], struct: type[_T]) -> _T:
    return cast("_T", settings_of(where, given, cast("Any", struct)))


def _read_yaml(where: str, path: str) -> Any:
    import yaml  # Ray brings it

    if not os.path.isfile(path):
        raise InvalidConfig(f"{where}={path!r}: there is no such file")
    try:
        return yaml.safe_load(Path(path).read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InvalidConfig(f"{where}={path!r} can't be read: {error}") from error
