"""vLLM's settings of structured outputs, under vLLM's names."""

from __future__ import annotations

from typing import Any

import msgspec

from raycore.options.declared import json_object, settings_of
from raycore.options.vllm_options import VllmOption, without_effect

GRAMMAR_BACKENDS = "auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer"


class StructuredOutputsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What holds for the structured outputs of all requests."""

    disable_any_whitespace: bool = False
    """Whether JSON has no white space between its parts, as with the setting of a request of the same name."""
    reasoning_parser: str = ""
    """The option of this name, where that isn't given."""
    reasoning_parser_plugin: str = ""
    """The option of this name, where that isn't given."""


_WITHOUT_EFFECT = (
    VllmOption("backend", GRAMMAR_BACKENDS, "structured outputs always use llguidance"),
    VllmOption("disable_fallback", (True, False), "structured outputs always use llguidance"),
    VllmOption("disable_additional_properties", (False,), "the schema says it"),
    VllmOption("enable_in_reasoning", (False,), "the reasoning is never constrained"),
)
"""vLLM's other settings. Values other than these are refused."""


def parse_structured_outputs_config(value: str | dict[str, Any] | None) -> StructuredOutputsConfig | None:
    """Convert what users pass. None: nothing has an effect.

    Raises:
        InvalidConfig: the value isn't a JSON object, or a setting is unknown, invalid or unsupported.
    """
    name = "structured_outputs_config"
    given = without_effect(name, json_object(name, value or {}), _WITHOUT_EFFECT)
    config = settings_of(name, given, StructuredOutputsConfig)
    return None if config == StructuredOutputsConfig() else config


def parsers_of(structured_outputs_config: object) -> dict[str, str]:
    """The options of a server that `structured_outputs_config` has, in any of the forms that it may be given in.

    Raises: those of `parse_structured_outputs_config`.
    """
    config: Any = structured_outputs_config
    if not isinstance(config, StructuredOutputsConfig):
        config = parse_structured_outputs_config(config) or StructuredOutputsConfig()
    names = "reasoning_parser", "reasoning_parser_plugin"
    return {name: value for name in names if (value := getattr(config, name))}
