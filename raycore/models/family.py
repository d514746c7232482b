"""What a family of models is, what several families read from config.json alike, and the families that plugins add.

A family is one file in this package. It reads its fields of config.json and returns the `Parts` that its layers are
made of. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from raycore.errors import InvalidCheckpoint, InvalidConfig
from raycore.json_fields import JsonFields
from raycore.models.activations import read_activation
from raycore.models.rotation import Rotation, parse_rotation
from raycore.models.spec import Gate, GateName, Parts
from raycore.parts.drafts.models import MtpNames
from raycore.parts.images.models import VisionSpec
from raycore.plugins import MODELS, find_plugin, plugin_failure, plugin_names

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""What Llama has where config.json says nothing, and most families with it."""


def plain_parts(config: JsonFields, **parts: Any) -> Parts:
    """Return `parts`. Where they lack one: the gate that `hidden_act` names, no window and one rotation for all layers,
    and Llama's for the rest.
    """
    num_layers = config.int_("num_hidden_layers")
    if "gate" not in parts:
        parts["gate"] = gate(config)
    parts["layer_windows"] = parts.get("layer_windows") or [None] * num_layers
    if "rotations" not in parts:
        parts["rotations"] = [parse_rotation(config)] * num_layers
    return Parts(**parts)


def gate(config: JsonFields, key: str = "hidden_act") -> Gate:
    """Return the activation of gates."""
    return read_activation(config, key, get_args(GateName))


def attention_biases(config: JsonFields, key: str = "attention_bias") -> dict[str, bool]:
    """Return the parts that say whether the projections of attention have biases: all or none of them."""
    has_bias = config.bool_(key)
    return {"qkv_bias": has_bias, "o_bias": has_bias}


def biases(config: JsonFields) -> dict[str, bool]:
    """Return these, and whether the projections of dense parts have biases, as `mlp_bias` says."""
    return attention_biases(config) | {"mlp_bias": config.bool_("mlp_bias")}


def ungated_parts(config: JsonFields, **parts: Any) -> Parts:
    """Return `parts`, with layer norms that have biases, and without gates."""
    return plain_parts(config, **{"is_gated": False, "norm": "biased_layer"} | parts)


def norm_eps_at(key: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a `Family.convert_config` for families whose config.json calls the norms' `rms_norm_eps` so."""
    return lambda config: config | {"rms_norm_eps": config[key]} if key in config else config


def check_known(config: JsonFields, known: Mapping[str, Any]) -> None:
    """Raise InvalidCheckpoint if config.json gives another value than the only one that is computed here.

    `known`: that value by key. A key may be missing or null.
    """
    for key, expected in known.items():
        if config.get(key) not in (None, expected):
            raise config.error(key, str(expected).lower() if isinstance(expected, bool) else str(expected))


def predictors(config: JsonFields, names: MtpNames | None = None) -> dict[str, Any]:
    """Return the parts that say which layers after the last one predict further tokens, under DeepSeek-V3's key.

    `names`: of their tensors, if the model can draft with them. None: it can't.
    """
    num = config.optional_int("num_nextn_predict_layers", low=0) or 0
    return {"num_predictors": num, "mtp": names if num else None}


def same_window(config: JsonFields) -> list[int | None]:
    """Return the windows of a family whose layers all have the window `sliding_window`, if there is one."""
    layer_types = config.list_("layer_types")
    window = config.optional_int("sliding_window")
    if window is not None and any(each != "sliding_attention" for each in layer_types or []):
        raise config.error("layer_types", "sliding_attention for every layer of this architecture")
    return [window] * config.int_("num_hidden_layers")


def sliding_layers(config: JsonFields) -> list[bool] | None:
    """Return for each layer whether `layer_types` says that it has a sliding window. None: there are no types."""
    layer_types, num_layers = config.list_("layer_types"), config.int_("num_hidden_layers")
    if layer_types is None:
        return None
    known = ("full_attention", "sliding_attention")
    if len(layer_types) != num_layers or any(layer_type not in known for layer_type in layer_types):
        expected = f"a list of {num_layers} entries (num_hidden_layers), each full_attention or sliding_attention"
        raise config.error("layer_types", expected)
    return [layer_type == "sliding_attention" for layer_type in layer_types]


def windows_by_type(config: JsonFields, full_every: int | None = None) -> list[int | None]:
    """Return each layer's window: `sliding_window` in the layers that `layer_types` says.

    `full_every`: without `layer_types`, every such layer has no window. None: no layer has one.
    """
    window = config.optional_int("sliding_window")
    return [window if is_sliding else None for is_sliding in _sliding(config, full_every)]


def rotations_by_type(config: JsonFields, local: Rotation, full_every: int | None = None) -> list[Rotation | None]:
    """Return each layer's rotation: that of `full_attention` or `sliding_attention`.

    Args:
        local: that of layers with windows, if config.json has one for all layers.
        full_every: as in `windows_by_type`.
    """
    full = parse_rotation(config, "full_attention")
    if config.child("rope_parameters").get("sliding_attention") is not None:
        local = parse_rotation(config, "sliding_attention")
    return [local if is_sliding else full for is_sliding in _sliding(config, full_every)]


def _sliding(config: JsonFields, full_every: int | None) -> list[bool]:
    given, num_layers = sliding_layers(config), config.int_("num_hidden_layers")
    if given is not None:
        return given
    return [full_every is not None and (layer + 1) % full_every != 0 for layer in range(num_layers)]


def _unchanged(config: dict[str, Any]) -> dict[str, Any]:
    return config


@dataclass(frozen=True)
class Family:
    """How raycore reads and computes the models of one architecture."""

    defaults: Mapping[str, Any] = field(default_factory=lambda: DEFAULTS)
    """For keys that config.json lacks. Its null stays null."""
    parts: Callable[[JsonFields], Parts] = plain_parts
    """Returns the parts of the model that config.json describes. Raises InvalidCheckpoint."""
    convert_config: Callable[[dict[str, Any]], dict[str, Any]] = _unchanged
    """Gets what is in config.json, and returns it under Llama's keys."""
    text_families: Mapping[str, Family] = field(default_factory=dict[str, "Family"])
    """Of a checkpoint that has a model of texts among others: the families of that model, by the `model_type` in
    config.json's `text_config`, the first one where that has none. Empty: config.json describes a model of texts
    alone."""
    vision: Callable[[JsonFields], VisionSpec] | None = None
    """Returns the encoder of images that config.json describes. None: raycore computes none."""
    only: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The settings with which raycore computes the models, by key. With others, transformers' code does. A key may be
    missing or null."""
    decoder: str | None = None
    """`package.module.Class` of a subclass of `raycore.decoder.decoder.Decoder`. None: that class itself. It is a path,
    because only workers import torch."""


def plugin_family(name: str) -> Family | None:
    """The family that a plugin adds for the architecture of this name; None if there is none.

    Raises:
        InvalidConfig: the plugin can't be imported, or isn't a `Family`.
    """
    found = find_plugin(MODELS, name)
    if found is not None and not isinstance(found, Family):
        raise InvalidConfig(f"the plugin {name!r} of {MODELS} is {found!r}, not a Family")
    return found


def plugin_families() -> list[str]:
    """The names of the architectures that plugins add."""
    return plugin_names(MODELS)


def fields_of(config: dict[str, Any], defaults: Mapping[str, Any]) -> JsonFields:
    """Return what a `Family.convert_config` gets, to be read with checks. `converted` says in their errors which file
    it is."""
    return JsonFields("", config, defaults)


def converted(name: str, family: Family, source: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return what is in config.json, whose path is `source`, under Llama's keys.

    Raises:
        InvalidCheckpoint: a value that the family's function reads isn't as it must be.
        InvalidConfig: the function failed.
    """
    try:
        return family.convert_config(config)
    except InvalidCheckpoint as error:
        raise InvalidCheckpoint(f"{source}{error}") from error
    except Exception as error:  # other people's code may raise anything
        raise plugin_failure(MODELS, name, error) from error
