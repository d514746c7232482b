"""Separates a model's reasoning from its content, with a parser for each family of models. Pure.

The parsers have the names of vLLM's `--reasoning-parser`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, NamedTuple

from raycore.errors import InvalidConfig
from raycore.server.parsers.tags import num_begun


class Parts(NamedTuple):
    """The next part of a message. Its reasoning comes before its content."""

    reasoning: str
    content: str


class ReasoningParser:
    """Reads one message. The same text gives the same parts, however it is split into pieces.

    Reasoning that is never closed extends to the end of the message. The tags belong to neither part. White space after
    a tag belongs to the part that the tag begins.
    """

    opening: ClassVar[str] = "<think>"
    """The prompt ends with it, or the model writes it."""
    closing: ClassVar[str] = "</think>"
    switch: ClassVar[str | None] = None
    """The chat template's variable that turns reasoning off if it is false."""
    calls_end_reasoning: ClassVar[bool] = False
    """Whether the model may call tools without closing its reasoning."""

    def __init__(self, is_reasoning: bool = True, call: str | None = None) -> None:
        """
        Args:
            is_reasoning: whether the message begins with reasoning, with or without the opening tag.
            call: the tag that opens a tool call. It ends the reasoning, too, and is part of the content.
        """
        self.is_reasoning = is_reasoning
        self.reasoning_length = 0
        """Characters of the reasoning so far, tags included; final once the reasoning has ended."""
        self._ends = [self.closing, *([call] if call is not None and self.calls_end_reasoning else [])]
        self._may_open = is_reasoning
        self._held = ""
        """Text that was fed but not returned yet."""

    def feed(self, text: str) -> Parts:
        """The parts that are certain once `text` has arrived."""
        self._held += text
        return self._run(is_last=False)

    def finish(self) -> Parts:
        """The rest of the message, when no more text follows."""
        return self._run(is_last=True)

    def _run(self, is_last: bool) -> Parts:
        reasoning = content = ""
        if self._may_open:
            self._skip_opening(is_last)
        if self.is_reasoning and not self._may_open:
            reasoning = self._take_reasoning(is_last)
        if not self.is_reasoning:
            content, self._held = self._held, ""
        return Parts(reasoning, content)

    def _skip_opening(self, is_last: bool) -> None:
        """Drop the opening tag if the message begins with it; wait as long as that is uncertain."""
        rest = self._held.lstrip()
        if rest.startswith(self.opening):
            self._drop(len(self._held) - len(rest) + len(self.opening))
        elif self.opening.startswith(rest) and not is_last:
            return
        self._may_open = False

    def _take_reasoning(self, is_last: bool) -> str:
        found = [(position, tag) for tag in self._ends if (position := self._held.find(tag)) >= 0]
        if found:
            position, tag = min(found)
            reasoning = self._drop(position)
            if tag == self.closing:
                self._drop(len(tag))
            self.is_reasoning = False
            return reasoning
        num_undecided = 0 if is_last else max(num_begun(self._held, tag) for tag in self._ends)
        return self._drop(len(self._held) - num_undecided)

    def _drop(self, num: int) -> str:
        dropped, self._held = self._held[:num], self._held[num:]
        self.reasoning_length += num
        return dropped


class DeepSeekR1Parser(ReasoningParser):
    """DeepSeek R1 and its distilled models: they always reason, unless the prompt closes the reasoning."""


class Qwen3Parser(ReasoningParser):
    """Qwen 3: reasons unless the request turns it off, and may call tools in the middle of its reasoning."""

    switch = "enable_thinking"
    calls_end_reasoning = True


PARSERS: Mapping[str, type[ReasoningParser]] = MappingProxyType({"deepseek_r1": DeepSeekR1Parser, "qwen3": Qwen3Parser})


def parser_named(name: str) -> type[ReasoningParser]:
    """Raises InvalidConfig when there is no parser of that name."""
    if name not in PARSERS:
        raise InvalidConfig(f"reasoning_parser={name!r} isn't one of {', '.join(PARSERS)}")
    return PARSERS[name]
