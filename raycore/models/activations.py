"""The names of activations in config.json, and raycore's. Does not import torch."""

from __future__ import annotations

__all__ = ["read_activation"]

from collections.abc import Collection, Mapping
from typing import Any

from raycore.json_fields import JsonFields

_NAMES: Mapping[str, str] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
}
"""By transformers' names."""


def read_activation(config: JsonFields, key: str, known: Collection[str]) -> Any:
    """Return the activation at `key`, which is one of `known`.

    Raises:
        InvalidCheckpoint: it is another one.
    """
    possible = {theirs: ours for theirs, ours in _NAMES.items() if ours in known}
    name = str(config.get(key))
    if name not in possible:
        raise config.error(key, f"one of {', '.join(possible)}")
    return possible[name]
