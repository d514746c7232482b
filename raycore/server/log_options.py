"""Options of the log of requests."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from raycore.errors import InvalidConfig
from raycore.options.declared import option, options_of


class LogOptions(msgspec.Struct, frozen=True):
    """What is logged of requests to the model.

    Raises:
        InvalidConfig: from the constructor, if outputs are to be logged and requests aren't.
    """

    enable_log_requests: Annotated[
        bool,
        option(
            "Log each request to the model, with its id and parameters. At level debug, its prompt, too: what users "
            "write.",
            is_http=True,
        ),
    ] = False
    enable_log_outputs: Annotated[
        bool,
        option(
            "Log outputs, too, with their finish reasons. At level debug, their token ids. Needs enable_log_requests.",
            is_http=True,
        ),
    ] = False
    enable_log_deltas: Annotated[
        bool, option("With enable_log_outputs: log each part of a stream when it is sent, too.", is_http=True)
    ] = True
    max_log_len: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        option(
            "Maximum number of characters of a text, and of token ids, that are logged.",
            default="no limit",
            is_http=True,
        ),
    ] = None

    def __post_init__(self) -> None:
        """Check what options need of each other."""
        if self.enable_log_outputs and not self.enable_log_requests:
            raise InvalidConfig("enable_log_outputs (--enable-log-outputs) needs enable_log_requests")


LOG_OPTIONS = options_of(LogOptions, "Log of requests")
"""The options of `LogOptions`."""
