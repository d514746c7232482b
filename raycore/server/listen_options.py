"""Options of `raycore serve` for its sockets: where it listens, TLS, limits of headers, and the log of connections.

Ray Serve has options of its own for these. This module imports little, because even `raycore --help` imports it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from raycore.errors import InvalidConfig
from raycore.options.declared import option, options_of


def _paths(paths: str | Sequence[str]) -> Sequence[str]:
    given = [paths] if isinstance(paths, str) else paths
    return [path.strip() for each in given for path in each.split(",") if path.strip()]


class ListenOptions(msgspec.Struct, frozen=True):
    """Where and how `raycore serve` listens.

    Raises:
        InvalidConfig: from the constructor, if options contradict each other.
    """

    host: Annotated[
        str,
        Meta(min_length=1),
        option(
            "Address to listen on. By default, only this machine can reach it. 0.0.0.0: all addresses of this machine.",
            metavar="HOST",
            expected="the name or address of an interface of this machine",
            is_common=True,
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int,
        Meta(ge=0, le=65535),
        option(
            "Port to listen on. 0: a free port, which is printed.",
            expected="an integer from 0 (a free port) to 65535",
            is_common=True,
        ),
    ] = 8000
    uds: Annotated[
        str | None, option("Path of a Unix domain socket to listen on, instead of host and port.", metavar="PATH")
    ] = None
    ssl_certfile: Annotated[
        str | None,
        option(
            "File with the server's certificate, and those of its issuers, as PEM. The server then speaks HTTPS.",
            metavar="FILE",
        ),
    ] = None
    ssl_keyfile: Annotated[
        str | None,
        option("File with the certificate's private key, as PEM. Default: the key is in ssl_certfile.", metavar="FILE"),
    ] = None
    ssl_ca_certs: Annotated[
        str | None, option("File with the authorities whose certificates clients may have, as PEM.", metavar="FILE")
    ] = None
    ssl_cert_reqs: Annotated[
        int,
        Meta(ge=0, le=2),
        option("Whether clients need a certificate. 0: no. 1: one that they send is checked. 2: yes."),
    ] = 0
    ssl_ciphers: Annotated[
        str | None, option("Ciphers for TLS up to 1.2, in OpenSSL's notation.", metavar="CIPHERS")
    ] = None
    enable_ssl_refresh: Annotated[
        bool, option("Read the files of certificates again when they change. Connections that exist keep theirs.")
    ] = False
    h11_max_incomplete_event_size: Annotated[
        int,
        Meta(ge=1),
        option("Maximum size of a request's line and headers together, in bytes. More: status 431."),
    ] = 64 << 10
    h11_max_header_count: Annotated[
        int, Meta(ge=1), option("Maximum number of headers of a request. More: status 431.")
    ] = 256
    header_timeout_s: Annotated[
        float,
        Meta(gt=0),
        option(
            "Seconds within which the headers of a new connection's request, or of a further one that has begun, must "
            "arrive. Later: status 408."
        ),
    ] = 30.0
    max_connections: Annotated[
        int,
        Meta(ge=1),
        option(
            "Maximum number of connections of an API server, and fewer if the system allows it fewer open files. "
            "Further ones get status 503."
        ),
    ] = 8192
    uvicorn_log_level: Annotated[
        Literal["critical", "error", "warning", "info", "debug", "trace"],
        option("Lowest level of the HTTP server's messages to log. From info on, each request is logged, on stdout."),
    ] = "warning"
    disable_uvicorn_access_log: Annotated[bool, option("Never log each request.")] = False
    disable_access_log_for_endpoints: Annotated[
        tuple[str, ...],
        option(
            "Paths whose requests aren't logged, separated by commas, such as /health,/metrics.",
            metavar="PATHS",
            default="none",
            convert=_paths,
        ),
    ] = ()
    log_config_file: Annotated[
        str | None,
        option(
            "File with a configuration of Python's logging, in JSON or YAML, as logging.config.dictConfig reads it.",
            metavar="FILE",
        ),
    ] = None

    def __post_init__(self) -> None:
        """Check what options need of each other."""
        for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_ciphers", "ssl_cert_reqs", "enable_ssl_refresh"):
            if getattr(self, name) and self.ssl_certfile is None:
                raise InvalidConfig(f"{name} (--{name.replace('_', '-')}) needs ssl_certfile (--ssl-certfile)")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise InvalidConfig(
                f"ssl_cert_reqs={self.ssl_cert_reqs} needs ssl_ca_certs (--ssl-ca-certs): no client's certificate "
                "could be checked"
            )
        if self.uds is not None and not os.path.basename(self.uds):
            raise InvalidConfig(f"uds={self.uds!r} isn't the path of a socket")

    @property
    def certificate_files(self) -> list[str]:
        """The files with certificates and keys."""
        return [path for path in (self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs) if path is not None]


LISTEN_OPTIONS = {each.name: each for each in options_of(ListenOptions, "Address")}
"""The options of `ListenOptions`, by name."""
