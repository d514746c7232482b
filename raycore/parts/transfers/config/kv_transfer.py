"""The options `kv_transfer_config` and `kv_events_config`: caches that live elsewhere. Does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from raycore.class_paths import import_class
from raycore.errors import InvalidConfig
from raycore.options.declared import json_object, settings_of
from raycore.options.vllm_options import ANY, VllmOption, without_effect
from raycore.plugins import KV_CONNECTORS, plugin_names

if TYPE_CHECKING:
    from raycore.models.spec import ModelSpec

OFFLOAD = "raycore.parts.transfers.connectors.offload.connector.OffloadConnector"
CONNECTORS: dict[str, str] = {
    "OffloadConnector": OFFLOAD,
    "OffloadingConnector": OFFLOAD,
    "SimpleCPUOffloadConnector": OFFLOAD,
    "PeersConnector": "raycore.parts.transfers.connectors.peers.connector.PeersConnector",
    "DisaggregationConnector": "raycore.parts.transfers.connectors.peers.connector.DisaggregationConnector",
}
"""raycore's own connectors: the paths of their classes, by the names that `kv_connector` takes. Those of vLLM's that do
the same are among them."""
Role = Literal["kv_both", "kv_producer", "kv_consumer"]


class KVTransferConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's settings of KV connectors, under vLLM's names."""

    kv_connector: str
    """The path of the connector's class."""
    kv_role: Role = "kv_both"
    """What the engine does with blocks: it gives them away, takes them, or both."""
    engine_id: str | None = None
    """What other engines call this one. None: its name."""
    kv_connector_extra_config: dict[str, Any] = {}
    """The connector's own settings."""
    kv_connector_module_path: str | None = None
    """The module that has the class, if `kv_connector` is the class's bare name."""
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    """What becomes of a request whose blocks didn't arrive: they are computed, or the request fails."""

    @property
    def is_producer(self) -> bool:
        """Whether the engine gives blocks away."""
        return self.kv_role != "kv_consumer"

    @property
    def is_consumer(self) -> bool:
        """Whether the engine takes blocks."""
        return self.kv_role != "kv_producer"

    @property
    def is_own(self) -> bool:
        """Whether the connector is one of raycore's own."""
        return self.kv_connector in CONNECTORS.values()

    @property
    def knows_groups(self) -> bool:
        """Whether the connector knows groups of layers: `KVConnector.knows_groups`.

        Raises:
            InvalidConfig: its class can't be imported.
        """
        return getattr(self._class(), "knows_groups", False)

    @property
    def knows_states(self) -> bool:
        """Whether the connector knows states of layers: `KVConnector.knows_states`.

        Raises:
            InvalidConfig: its class can't be imported.
        """
        return getattr(self._class(), "knows_states", False)

    def _class(self) -> object:
        return import_class("kv_connector", self.kv_connector, KV_CONNECTORS)


class KVEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's settings of KV events, under vLLM's names."""

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] | None = None
    """None: zmq if events are on."""
    endpoint: str = "tcp://*:5557"
    """Where the publisher of rank 0 binds. Rank r adds r to the port."""
    replay_endpoint: str | None = None
    """Where it sends earlier batches again, to those who ask. None: nowhere."""
    buffer_steps: Annotated[int, Meta(ge=1)] = 10_000
    """Number of batches that are kept for that."""
    hwm: Annotated[int, Meta(ge=0)] = 100_000
    """Number of batches that are kept for a slow subscriber. Later ones are lost to it."""
    max_queue_size: Annotated[int, Meta(ge=1)] = 100_000
    """Number of batches that wait to be sent. Later ones are dropped, and counted."""
    topic: str = ""

    @property
    def publishes(self) -> bool:
        """Whether events leave the process."""
        return self.enable_kv_cache_events and self.publisher != "null"


_WITHOUT_EFFECT = (
    VllmOption("kv_buffer_device", ("cpu", "cuda"), "connectors choose their buffers themselves"),
    VllmOption("kv_port", (ANY,), "ranks tell each other their addresses"),
    VllmOption("enable_permute_local_kv", (False,), "all ranks have the same layout"),
)
"""vLLM's other settings. Values other than these are refused."""


def parse_kv_transfer_config(value: str | dict[str, Any] | None) -> KVTransferConfig | None:
    """Convert what users pass. None and an object without a connector turn transfers off.

    Raises:
        InvalidConfig: the value isn't a JSON object, a setting is unknown or invalid, or the connector's name is
            neither that of one of raycore's nor the path of a class.
    """
    if value is None:
        return None
    given = without_effect("kv_transfer_config", json_object("kv_transfer_config", value), _WITHOUT_EFFECT)
    given = {name: each for name, each in given.items() if each is not None}
    if "kv_connector" not in given:
        if given.keys() - {"engine_id"}:
            raise InvalidConfig(
                f"kv_transfer_config={value!r} names no connector: give kv_connector, one of "
                f"{', '.join(CONNECTORS)} or the path of a class"
            )
        return None
    config = settings_of("kv_transfer_config", given, KVTransferConfig)
    return msgspec.structs.replace(config, kv_connector=_class_path(config))


def parse_kv_events_config(value: str | dict[str, Any] | None) -> KVEventsConfig | None:
    """Convert what users pass. None, and settings that don't turn events on, turn them off.

    Raises:
        InvalidConfig: the value isn't a JSON object, a setting is unknown or invalid, or zmq isn't installed.
    """
    if value is None:
        return None
    config = settings_of("kv_events_config", json_object("kv_events_config", value), KVEventsConfig)
    for name in ("endpoint", "replay_endpoint"):
        endpoint = getattr(config, name)
        if endpoint is not None and not endpoint.startswith(("tcp://", "ipc://", "inproc://")):
            raise InvalidConfig(f"kv_events_config: {name}={endpoint!r} isn't an endpoint such as 'tcp://*:5557'")
    return config if config.enable_kv_cache_events else None


def _class_path(config: KVTransferConfig) -> str:
    name, module = config.kv_connector, config.kv_connector_module_path
    if module is not None:
        return name if "." in name else f"{module}.{name}"
    if name in CONNECTORS:
        return CONNECTORS[name]
    if "." not in name and name not in plugin_names(KV_CONNECTORS):
        raise InvalidConfig(
            f"kv_transfer_config: kv_connector={name!r} is none of {', '.join(CONNECTORS)}: name a class of your own "
            "as package.module.Class, or give kv_connector_module_path"
        )
    return name


def offloading(size_gib: float, transfer: KVTransferConfig | None) -> KVTransferConfig:
    """Return the transfers that `kv_offloading_size` asks for: so much host memory for all workers of a rank.

    Raises:
        InvalidConfig: `kv_transfer_config` asks for another connector.
    """
    transfer = transfer or KVTransferConfig(OFFLOAD)
    if transfer.kv_connector != OFFLOAD:
        raise InvalidConfig(
            f"kv_offloading_size={size_gib:g} and kv_transfer_config with kv_connector={transfer.kv_connector!r} are "
            "two connectors: omit one of them"
        )
    extra = {**transfer.kv_connector_extra_config, "cpu_bytes_to_use": int(size_gib * 2**30)}
    return msgspec.structs.replace(transfer, kv_role="kv_both", kv_connector_extra_config=extra)


def check_kv_transfer(transfer: KVTransferConfig | None, chosen: dict[str, Any], spec: ModelSpec) -> None:
    """Check what no connector works with.

    Raises:
        InvalidConfig: the engine has it. The message names the option.
    """
    if transfer is None:
        return
    asked = f"kv_transfer_config's {transfer.kv_connector.rpartition('.')[2]}"
    why = spec.why_not("kv_transfer")
    if why is not None:
        raise InvalidConfig(f"{asked} can't be used with {spec.architecture}, which {why}: omit it")
    if all(mixer.cached(spec, layer).kind == "none" for layer, mixer in enumerate(spec.mixers)):
        raise InvalidConfig(f"{asked} can't be used with {spec.architecture}, which has no KV cache: omit it")
    if spec.keeps_states and not transfer.knows_states:
        raise InvalidConfig(
            f"{asked} can't be used with {spec.architecture}, which has layers that keep a state: omit it, or use a "
            "connector that sets knows_states"
        )
    speculative = chosen.get("speculative_config")
    if speculative is not None and speculative.has_model:
        raise InvalidConfig(
            f"{asked} can't be used with speculative_config's method {speculative.method!r}, whose model has a cache "
            "of its own: use 'ngram' or 'suffix', or omit one of them"
        )
