"""Lets users' logits processors check the parameters of requests, before these are submitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from raycore.config import EngineConfig
from raycore.config.logits_processors import processor_classes
from raycore.errors import InvalidRequest
from raycore.sampling_params import SamplingParams

Validator = tuple[str, Callable[[SamplingParams], Any]]
"""A class's name, and its `validate_params`."""


def validators(config: EngineConfig) -> list[Validator]:
    """The checks of an engine's logits processors.

    Raises:
        InvalidConfig: a class can't be imported.
    """
    if not config.has_logits_processors:
        return []
    classes = processor_classes(config.plugins, config.logits_processors)
    return [
        (each.__qualname__, each.validate_params)
        for each in classes
        if callable(getattr(each, "validate_params", None))
    ]


def validate(validators: Sequence[Validator], params: SamplingParams) -> None:
    """Check a request's parameters. Raises InvalidRequest if a processor raises ValueError."""
    for name, check in validators:
        try:
            check(params)
        except InvalidRequest:
            raise
        except ValueError as error:
            raise InvalidRequest(f"the logits processor {name} refuses the request: {error}") from error
