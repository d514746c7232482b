"""Tells what a model thinks from what it says, each parser for a family of models. Pure.

Names are those of vLLM's `--reasoning-parser`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, NamedTuple

from raycore.errors import InvalidConfig
from raycore.server.parsers.tags import num_begun


class Parts(NamedTuple):
    """More of a message: what is thought comes before what is said."""

    reasoning: str
    content: str


class ReasoningParser:
    """Reads one message. The same text gives the same parts, however it is split into pieces.

    A thought that isn't closed is all of the message. The tags belong to neither part, the white space behind them to
    what it stands in.
    """

    opening: ClassVar[str] = "<think>"
    """Models write it, or find it at the end of their prompt."""
    closing: ClassVar[str] = "</think>"
    switch: ClassVar[str | None] = None
    """The variable by which chat templates are told not to let the model think."""
    calls_end_thoughts: ClassVar[bool] = False
    """Whether the model may call tools without closing its thought."""

    def __init__(self, is_thinking: bool = True, call: str | None = None) -> None:
        """
        Args:
            is_thinking: whether the message begins with a thought, opened or not.
            call: announces a tool call, which ends a thought, too, and is said.
        """
        self.is_thinking = is_thinking
        self.thought_length = 0
        """Characters of the thought, with its tags, so far; all of them once it has ended."""
        self._ends = [self.closing, *([call] if call is not None and self.calls_end_thoughts else [])]
        self._may_open = is_thinking
        self._held = ""
        """Text that came and of which nothing has been told yet."""

    def feed(self, text: str) -> Parts:
        """What is known once `text` has come."""
        self._held += text
        return self._run(is_last=False)

    def finish(self) -> Parts:
        """What remains when nothing follows."""
        return self._run(is_last=True)

    def _run(self, is_last: bool) -> Parts:
        reasoning = content = ""
        if self._may_open:
            self._pass_opening(is_last)
        if self.is_thinking and not self._may_open:
            reasoning = self._take_thought(is_last)
        if not self.is_thinking:
            content, self._held = self._held, ""
        return Parts(reasoning, content)

    def _pass_opening(self, is_last: bool) -> None:
        """Leave out the tag where there is one; that may still have to be seen."""
        rest = self._held.lstrip()
        if rest.startswith(self.opening):
            self._drop(len(self._held) - len(rest) + len(self.opening))
        elif self.opening.startswith(rest) and not is_last:
            return
        self._may_open = False

    def _take_thought(self, is_last: bool) -> str:
        found = [(position, tag) for tag in self._ends if (position := self._held.find(tag)) >= 0]
        if found:
            position, tag = min(found)
            reasoning = self._drop(position)
            if tag == self.closing:
                self._drop(len(tag))
            self.is_thinking = False
            return reasoning
        num_undecided = 0 if is_last else max(num_begun(self._held, tag) for tag in self._ends)
        return self._drop(len(self._held) - num_undecided)

    def _drop(self, num: int) -> str:
        dropped, self._held = self._held[:num], self._held[num:]
        self.thought_length += num
        return dropped


class DeepSeekR1Parser(ReasoningParser):
    """DeepSeek R1 and what was distilled from it: always thinks, unless the prompt closes the thought."""


class Qwen3Parser(ReasoningParser):
    """Qwen 3: thinks unless told not to, and may call tools in the middle of a thought."""

    switch = "enable_thinking"
    calls_end_thoughts = True


PARSERS: Mapping[str, type[ReasoningParser]] = MappingProxyType({"deepseek_r1": DeepSeekR1Parser, "qwen3": Qwen3Parser})


def parser_named(name: str) -> type[ReasoningParser]:
    """Raises InvalidConfig when there is none of that name."""
    if name not in PARSERS:
        raise InvalidConfig(f"reasoning_parser={name!r}: there are {', '.join(PARSERS)}")
    return PARSERS[name]
