"""The option that sends traces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated
from urllib.parse import urlsplit

import msgspec

from raycore.errors import InvalidConfig
from raycore.options.declared import option


def parse_endpoint(value: str | None) -> str | None:
    """Return the URL of a collector if it is one.

    Raises:
        InvalidConfig: it isn't.
    """
    if value is not None and not _is_url(value):
        raise InvalidConfig(
            f"otlp_traces_endpoint={value!r}: give a URL, such as http://localhost:4317, with a port from 1 to 65535"
        )
    return value


class TracesConfig(msgspec.Struct, frozen=True):
    """Where OpenTelemetry traces are sent."""

    otlp_traces_endpoint: Annotated[
        str | None,
        option(
            "URL of an OTLP collector, which gets OpenTelemetry traces of requests and of the start. They are sent "
            "over HTTP if the URL's path is /v1/traces, else over gRPC. Needs the extra `otel`. None: no traces.",
            metavar="URL",
            expected="a URL",
            convert=parse_endpoint,
        ),
    ] = None

    @property
    def is_on(self) -> bool:
        """Whether traces are sent."""
        return self.otlp_traces_endpoint is not None

    def variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """OpenTelemetry's variables (`OTEL_…`), for processes that don't inherit them. Empty if no traces are sent."""
        return {name: value for name, value in environment.items() if self.is_on and name.startswith("OTEL_")}


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except (AttributeError, ValueError):  # it is no string, or the port isn't one
        return False
