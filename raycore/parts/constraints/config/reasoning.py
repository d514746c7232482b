"""The option `reasoning_config`: how a model writes its reasoning."""

from __future__ import annotations

from typing import Any

import msgspec

from raycore.errors import InvalidConfig
from raycore.options.declared import json_object, settings_of
from raycore.plugins import REASONING_PARSERS, find_plugin, plugin_names
from raycore.reasoning_tags import TAGS, ReasoningTags


class ReasoningConfig(msgspec.Struct, frozen=True):
    """How a model writes its reasoning. The fields are vLLM's."""

    reasoning_parser: str = ""
    """The name of a reasoning parser, whose tags these are."""
    reasoning_start_str: str = ""
    """The tag before the reasoning. Empty: the parser's."""
    reasoning_end_str: str = ""
    """What ends reasoning that has become too long. Empty: the parser's tag after the reasoning."""

    def tags(self) -> ReasoningTags:
        """The tags that the fields stand for."""
        known = _tags_of(self.reasoning_parser) if self.reasoning_parser else ReasoningTags("", "")
        opening, forced = self.reasoning_start_str or known.opening, self.reasoning_end_str or known.forced
        return ReasoningTags(opening, known.closing or forced, forced)


def parse_reasoning_config(reasoning_config: str | dict[str, Any] | None) -> ReasoningConfig | None:
    """Convert the option `reasoning_config`, a dict or a JSON object.

    Raises:
        InvalidConfig: it is neither, has unknown keys, or names no tags.
    """
    if not reasoning_config:
        return None
    config = settings_of("reasoning_config", json_object("reasoning_config", reasoning_config), ReasoningConfig)
    tags = config.tags()
    if not tags.opening or not tags.closing:
        raise InvalidConfig(
            f"reasoning_config={reasoning_config!r} doesn't say how reasoning begins and ends: give reasoning_parser, "
            "or reasoning_start_str and reasoning_end_str"
        )
    return config


def with_parser(config: ReasoningConfig | None, reasoning_parser: object) -> ReasoningConfig | None:
    """The option `reasoning_config`, in which `reasoning_parser` may be given as vLLM's option of this name.

    Outside of servers, a parser has no other use, so names of unknown ones have none.
    """
    if not isinstance(reasoning_parser, str) or (config is not None and config.reasoning_parser):
        return config
    if reasoning_parser not in TAGS and reasoning_parser not in plugin_names(REASONING_PARSERS):
        return config
    return msgspec.structs.replace(config or ReasoningConfig(), reasoning_parser=reasoning_parser)


def _tags_of(parser: str) -> ReasoningTags:
    if parser in TAGS:
        return TAGS[parser]
    found = find_plugin(REASONING_PARSERS, parser)
    if found is None:
        names = ", ".join([*TAGS, *plugin_names(REASONING_PARSERS)])
        raise InvalidConfig(f"reasoning_config: reasoning_parser={parser!r} isn't one of {names}")
    return ReasoningTags(found.opening, found.closing, found.forced)
