"""What callers tell an engine's KV connector with a request, and what it tells them when a sequence ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, cast

import msgspec

from raycore.config import EngineConfig
from raycore.errors import InvalidRequest
from raycore.json_fields import shortened
from raycore.messages import TokenReport
from raycore.outputs import RequestOutput
from raycore.parts.transfers.connectors.connector import connector_class
from raycore.parts.transfers.values import PARAMS
from raycore.sampling_params import SamplingParams


class ConnectorParams:
    """Adds to outputs what the connector tells. Implements `OutputPart`."""

    name: ClassVar[str] = PARAMS

    def is_asked(self, params: SamplingParams) -> bool:
        """True: a connector may tell something of any request."""
        return True

    def begin(self, params: SamplingParams) -> ParamsOfRequest:
        """Return what keeps what is told of a new request."""
        return ParamsOfRequest()


class ParamsOfRequest:
    """What the connector has told of one request. Implements `OutputAddition`."""

    def __init__(self) -> None:
        self._told: dict[int, dict[str, Any]] = {}
        """By sequence."""

    def take(self, index: int, report: TokenReport) -> None:
        """Note what is told at the end of a sequence."""
        self._told[index] = msgspec.msgpack.decode(report.data)

    def add_to(self, output: RequestOutput) -> None:
        """Set the field of the sequences that have ended, and that of the request."""
        if self._told:
            output.kv_transfer_params = self._told[min(self._told)]
            for each in output.outputs:
                each.kv_transfer_params = self._told.get(each.index)


def output_parts(config: EngineConfig) -> Iterator[ConnectorParams]:
    """Yield what an engine's clients have. Nothing is told without a connector."""
    if config.kv_transfer_config is not None:
        yield ConnectorParams()


def params_check(config: EngineConfig) -> Callable[[SamplingParams], None]:
    """Return what checks the `kv_transfer_params` of a request. It raises InvalidRequest."""

    def check(params: SamplingParams) -> None:
        told = None if params.extra_args is None else params.extra_args.get(PARAMS)
        if told in (None, {}):
            return
        if not isinstance(told, dict):
            raise InvalidRequest(f"{PARAMS}={shortened(told)} isn't a dict")
        if config.kv_transfer_config is None:
            raise InvalidRequest(
                f"{PARAMS} needs an engine with a KV connector that reads them (kv_transfer_config): omit it"
            )
        given = cast("dict[str, Any]", told)
        try:
            connector_class(config).check_params(given, config)
        except ValueError as error:
            raise InvalidRequest(f"{PARAMS}={shortened(given)}: {error}") from error

    return check
