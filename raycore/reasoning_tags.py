"""The tags around a model's reasoning, by the names of `reasoning_parser`. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec


class ReasoningTags(msgspec.Struct, frozen=True):
    """How a model writes its reasoning."""

    opening: str
    """The tag before the reasoning."""
    closing: str
    """The tag after it."""
    forced: str = ""
    """What ends reasoning that has become too long. Empty: `closing`."""
    is_open: bool | None = None
    """Whether the output begins with reasoning. None: if `opening` is the last of both tags in the prompt."""


_THINK = ReasoningTags("<think>", "</think>")

TAGS: Mapping[str, ReasoningTags] = MappingProxyType(
    {
        "deepseek_r1": _THINK,
        "qwen3": _THINK,
        "glm45": _THINK,
        "minimax_m2": _THINK,
        "openai_gptoss": ReasoningTags(
            "<|channel|>analysis<|message|>",
            "<|channel|>final<|message|>",
            "<|end|><|start|>assistant<|channel|>final<|message|>",
        ),
    }
)
"""The tags of the parsers in `raycore.server.parsers.reasoning`."""
