"""Finds the tool calls in a model's text, with a parser for the format of each family of models.

The parsers are named like the corresponding values of vLLM's `--tool-call-parser`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from raycore.errors import InvalidConfig
from raycore.plugins import TOOL_PARSERS, find_plugin, plugin_names
from raycore.server.parsers.tool_calls.base import CallArguments, CallStart, Content, Delta, ToolParser
from raycore.server.parsers.tool_calls.call_grammar import Schemas
from raycore.server.parsers.tool_calls.glm import Glm45Parser, Glm47Parser
from raycore.server.parsers.tool_calls.harmony import HarmonyToolParser
from raycore.server.parsers.tool_calls.json_calls import HermesParser, Llama3JsonParser
from raycore.server.parsers.tool_calls.minimax_m2 import MiniMaxM2Parser
from raycore.server.parsers.tool_calls.mistral import MistralParser
from raycore.server.parsers.tool_calls.parameters import function_schema
from raycore.server.parsers.tool_calls.pythonic import PythonicParser
from raycore.server.parsers.tool_calls.qwen3_coder import Qwen3CoderParser

PARSERS: Mapping[str, type[ToolParser]] = MappingProxyType(
    {
        "hermes": HermesParser,
        "qwen3_coder": Qwen3CoderParser,
        "qwen3_xml": Qwen3CoderParser,
        "llama3_json": Llama3JsonParser,
        "mistral": MistralParser,
        "glm45": Glm45Parser,
        "glm47": Glm47Parser,
        "minimax_m2": MiniMaxM2Parser,
        "openai": HarmonyToolParser,
        "pythonic": PythonicParser,
    }
)

__all__ = [
    "PARSERS",
    "CallArguments",
    "CallStart",
    "Content",
    "Delta",
    "Schemas",
    "ToolParser",
    "function_schema",
    "parser_named",
]


def parser_named(name: str) -> type[ToolParser]:
    """The parser class with this name, of raycore or of a plugin. Raises InvalidConfig if there is none."""
    parser = PARSERS.get(name) or find_plugin(TOOL_PARSERS, name)
    if parser is None:
        raise InvalidConfig(
            f"tool_call_parser={name!r} isn't one of {', '.join([*PARSERS, *plugin_names(TOOL_PARSERS)])}"
        )
    return parser
