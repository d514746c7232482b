"""The option `ec_transfer_config`: embeddings of images that live elsewhere. Does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from raycore.errors import InvalidConfig
from raycore.options.declared import json_object, settings_of
from raycore.options.vllm_options import ANY, VllmOption, without_effect
from raycore.plugins import EC_CONNECTORS, plugin_names

if TYPE_CHECKING:
    from raycore.config.parallel import ParallelConfig
    from raycore.models.spec import ModelSpec

CONNECTORS = {"ECStoreConnector": "raycore.parts.transfers.connectors.embeddings.EmbeddingStore"}
"""raycore's own: the paths of their classes, by the names that `ec_connector` takes."""
Role = Literal["ec_producer", "ec_consumer", "ec_both"]


class ECStoreSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`ec_connector_extra_config`."""

    cpu_bytes_to_use: Annotated[int, Meta(ge=0)] = 1 << 30
    """Host memory of each worker for embeddings that were dropped from its encoder cache."""
    path: str | None = None
    """A directory that workers, ranks and engines share. None: there is none."""
    max_path_bytes: Annotated[int, Meta(ge=1)] = 10 << 30
    """Of all files in it."""


class ECTransferConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's settings of encoder-cache connectors, under vLLM's names."""

    ec_connector: str
    """The path of the connector's class, or the name of a plugin."""
    ec_role: Role = "ec_both"
    """Whether workers save embeddings, load them, or both. An engine that only saves them has no model of texts."""
    engine_id: str | None = None
    """What other engines call this one. Only classes of one's own know it: others share a directory."""
    ec_connector_extra_config: ECStoreSettings = ECStoreSettings()

    @property
    def saves(self) -> bool:
        """Whether embeddings are saved."""
        return self.ec_role != "ec_consumer"

    @property
    def loads(self) -> bool:
        """Whether embeddings are loaded."""
        return self.ec_role != "ec_producer"


_WITHOUT_EFFECT = (
    VllmOption("ec_buffer_device", ("cpu", "cuda"), "embeddings are moved without a buffer"),
    VllmOption("ec_buffer_size", (ANY,), "embeddings are moved without a buffer"),
    VllmOption("ec_ip", (ANY,), "workers share a directory"),
    VllmOption("ec_port", (ANY,), "workers share a directory"),
)
"""vLLM's other settings. Values other than these are refused."""


def parse_ec_transfer_config(value: str | dict[str, Any] | None) -> ECTransferConfig | None:
    """Convert what users pass. None turns transfers off.

    Raises:
        InvalidConfig: the value isn't a JSON object, a setting is unknown or invalid, or the connector's name is
            neither one of raycore's nor that of a plugin nor the path of a class.
    """
    if value is None:
        return None
    given = without_effect("ec_transfer_config", json_object("ec_transfer_config", value), _WITHOUT_EFFECT)
    given = {name: each for name, each in given.items() if each is not None}
    extra = given.get("ec_connector_extra_config")
    if extra is not None:  # names what is wrong
        settings_of("ec_connector_extra_config", json_object("ec_connector_extra_config", extra), ECStoreSettings)
    config = settings_of("ec_transfer_config", given, ECTransferConfig)
    path = CONNECTORS.get(config.ec_connector, config.ec_connector)
    if "." not in path and path not in plugin_names(EC_CONNECTORS):
        raise InvalidConfig(
            f"ec_transfer_config: ec_connector={path!r} is unknown: give one of {', '.join(CONNECTORS)}, the path of a "
            "class, or the name of a plugin"
        )
    if config.engine_id is not None and path in CONNECTORS.values():
        raise InvalidConfig(
            f"ec_transfer_config: engine_id={config.engine_id!r} has no use with ec_connector={config.ec_connector!r}, "
            "by which engines share a directory: omit it"
        )
    return msgspec.structs.replace(config, ec_connector=path)


_NEEDS_TEXTS = (
    *("enable_lora", "enable_prefix_caching", "enable_prompt_embeds", "enable_return_routed_experts"),
    *("kv_events_config", "kv_offloading_size", "kv_transfer_config", "speculative_config", "weight_transfer_config"),
)
"""Options that an engine can't have that only encodes images."""


def check_ec_transfer(chosen: dict[str, Any], parallel: ParallelConfig, spec: ModelSpec) -> None:
    """Check what is asked of an engine that shares embeddings of images. One that only encodes keeps no prefixes:
    `chosen` says so afterwards.

    Raises:
        InvalidConfig: the model has no images, or the engine only encodes, and is asked for more.
    """
    transfer: ECTransferConfig | None = chosen.get("ec_transfer_config")
    if transfer is None:
        return
    if spec.vision is None:
        raise InvalidConfig(f"ec_transfer_config: {spec.architecture} has no encoder of images: omit it")
    if not spec.encodes_only:
        return
    asked = next((f"{name}={chosen[name]!r}" for name in _NEEDS_TEXTS if chosen.get(name)), None)
    if parallel.pipeline_parallel_size > 1:
        asked = f"pipeline_parallel_size={parallel.pipeline_parallel_size}"
    elif chosen.get("load_format") == "sharded_state":
        asked = "load_format='sharded_state'"
    elif spec.pooling is not None:
        asked = "a model that pools"
    if asked is not None:
        raise InvalidConfig(
            f"ec_transfer_config: an engine with ec_role='ec_producer' only encodes images, so it can't have {asked}: "
            "omit it, or use ec_role='ec_both'"
        )
    chosen["enable_prefix_caching"] = False  # otherwise, an image of a known prompt wouldn't be encoded and offered
