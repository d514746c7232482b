"""The option `weight_transfer_config`: by which way a trainer's weights come. Does not import torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from raycore.options.declared import json_object, settings_of


class WeightTransferConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How tensors come to workers in `update_weights()`."""

    backend: Literal["nccl", "ipc", "ray", "disk"] = "nccl"
    """nccl: broadcasts of torch.distributed, by Gloo on CPUs. ipc: memory of the node or GPU. ray: objects in Ray's
    store. disk: a directory with safetensors files."""
    timeout_s: Annotated[float, Meta(gt=0)] = 300.0
    """How long a worker waits for the trainer."""


def parse_weight_transfer_config(value: str | dict[str, Any] | None) -> WeightTransferConfig | None:
    """Convert what users pass.

    Raises:
        InvalidConfig: the value isn't a JSON object, or a setting is unknown or invalid.
    """
    if value is None:
        return None
    return settings_of("weight_transfer_config", json_object("weight_transfer_config", value), WeightTransferConfig)
