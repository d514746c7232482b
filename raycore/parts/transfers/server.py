"""What clients of a server and its engine's KV connector tell each other: a field of requests, and one of responses."""

from __future__ import annotations

from typing import Any

from raycore.outputs import CompletionOutput, RequestOutput
from raycore.parts.transfers.values import PARAMS
from raycore.sampling_params import json_like


def with_params(extra_args: dict[str, Any] | None, given: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the sampling parameter `extra_args` of a request whose field `kv_transfer_params` is `given`.

    Raises:
        InvalidRequest: a value isn't as in JSON.
    """
    return {**(extra_args or {}), PARAMS: json_like(PARAMS, given)} if given else extra_args


def told(output: RequestOutput | CompletionOutput) -> dict[str, Any]:
    """The field of a response, or of a choice. Empty if the connector has told nothing."""
    return {} if output.kv_transfer_params is None else {PARAMS: output.kv_transfer_params}
