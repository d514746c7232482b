"""What raycore has to know of an architecture, and the architectures that plugins add. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from raycore.errors import InvalidConfig
from raycore.plugins import MODELS, find_plugin, plugin_failure, plugin_names

LLAMA_DEFAULTS: Mapping[str, Any] = {
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
"""What Llama has where config.json says nothing."""


class Family(msgspec.Struct, frozen=True):
    """An architecture's defaults for keys that config.json lacks, and its properties that no key sets."""

    defaults: Mapping[str, Any]
    qkv_bias: bool | None = False
    """Whether Q, K and V projections have a bias. None: `attention_bias` decides, also for the output projection."""
    qk_norm: bool = False
    windows: Literal["none", "every layer", "every layer if used", "by layer"] = "none"
    """Layers with a sliding window. `every layer if used` and `by layer` need `use_sliding_window: true`."""


def _unchanged(config: dict[str, Any]) -> dict[str, Any]:
    return config


@dataclass(frozen=True)
class Architecture:
    """How raycore reads and computes an architecture: a decoder like Llama's, or one with a class of its own.

    The tensors in the checkpoint have the names and shapes that Llama's have, for the sizes in config.json.
    """

    family: Family = field(default_factory=lambda: Family(LLAMA_DEFAULTS))
    convert_config: Callable[[dict[str, Any]], dict[str, Any]] = _unchanged
    """Gets what is in config.json, and returns it under Llama's keys."""
    decoder: str | None = None
    """`package.module.Class` of a subclass of `raycore.decoder.decoder.Decoder`. None: that class itself. It is a path,
    because only workers import torch."""


def plugin_architecture(name: str) -> Architecture | None:
    """The architecture that a plugin adds under this name; None if there is none.

    Raises:
        InvalidConfig: the plugin can't be imported, or isn't an `Architecture`.
    """
    found = find_plugin(MODELS, name)
    if found is not None and not isinstance(found, Architecture):
        raise InvalidConfig(f"the plugin {name!r} of {MODELS} is {found!r}, not an Architecture")
    return found


def plugin_architectures() -> list[str]:
    """The names of the architectures that plugins add."""
    return plugin_names(MODELS)


def convert_config(name: str, architecture: Architecture, config: dict[str, Any]) -> dict[str, Any]:
    """Return what is in config.json under Llama's keys.

    Raises:
        InvalidConfig: the architecture's function failed.
    """
    try:
        return architecture.convert_config(config)
    except Exception as error:  # other people's code may raise anything
        raise plugin_failure(MODELS, name, error) from error
