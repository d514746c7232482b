"""The option, and what it excludes."""

from __future__ import annotations

from typing import Annotated

import msgspec

from raycore.errors import InvalidConfig
from raycore.models.spec import ModelSpec
from raycore.options.declared import option
from raycore.parts.transfers.config.kv_transfer import KVTransferConfig


class RoutedExpertsConfig(msgspec.Struct, frozen=True):
    """Whether outputs say which experts computed their tokens."""

    enable_return_routed_experts: Annotated[
        bool,
        option(
            "Return the experts of each token with outputs (`routed_experts`), of mixture-of-experts models. Requests "
            "in Python get them, HTTP doesn't. Each step's ids are sent from the workers to the client, prompts go "
            "through all of the last layer, and GPUs capture no CUDA graphs."
        ),
    ] = False


def check_routed_experts(
    asked: RoutedExpertsConfig, spec: ModelSpec, transfer: KVTransferConfig | None, num_context_parts: int
) -> RoutedExpertsConfig:
    """Return what is asked, if nothing excludes it.

    `num_context_parts`: the option `prefill_context_parallel_size`.

    Raises:
        InvalidConfig: something does. The message names it.
    """
    why = None
    if not spec.has_experts:
        why = f"{spec.architecture}, which has no experts that raycore knows: omit it"
    elif spec.implementation == "transformers":
        why = "model_impl='transformers', whose experts choose by themselves: omit it, or use a family of raycore"
    elif spec.pooling is not None:
        why = f"{spec.architecture}, which pools: omit it"
    elif transfer is not None:
        why = (
            f"kv_transfer_config's {transfer.kv_connector.rpartition('.')[2]}, because the experts of tokens from "
            "elsewhere aren't known: omit one of them"
        )
    elif num_context_parts > 1:
        why = (
            f"prefill_context_parallel_size={num_context_parts}, whose workers compute different tokens: omit one of "
            "them"
        )
    if why is not None and asked.enable_return_routed_experts:
        raise InvalidConfig(f"enable_return_routed_experts=True can't be used with {why}")
    return asked
