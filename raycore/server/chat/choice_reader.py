"""Turns the text of a choice into parts of a message: first separates the reasoning, then finds calls in the rest."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from raycore.server.chat.parts import Part, ReasoningText
from raycore.server.chat.reasoning import Reasoning
from raycore.server.chat.tools import MessageReader, TextEnd
from raycore.server.parsers.reasoning import Origin, ReasoningPiece
from raycore.server.parsers.tool_calls import Content


class ChoiceReader:
    """Turns the text of one choice into parts of a message, while the text arrives."""

    def __init__(self, reasoning: Reasoning | None, calls: MessageReader | None) -> None:
        self._reasoning = None if reasoning is None else reasoning.reader()
        self._calls = calls
        self._num_content = 0
        """Number of characters that aren't reasoning."""

    def read(self, text: str, finish_reason: str | None, stop_reason: int | str | None) -> list[Part]:
        """Take the next piece of text, or the whole one. Returns the parts that are certain now.

        `finish_reason`: None if more text follows.

        Raises:
            APIError: the model did not make a required tool call.
        """
        end = _end_of(finish_reason, stop_reason)
        reasoning, content = self._split(text, is_last=end is not None)
        parts: list[Part] = [ReasoningText(reasoning)] if reasoning else []
        if self._calls is not None:
            others = self._calls.read(content, end)
        else:
            others = [Content(content, self._num_content)] if content else []
        self._num_content += len(content)
        origins = None if self._reasoning is None else self._reasoning.origins
        return parts + (others if origins is None else [part for each in others for part in _located(each, origins)])

    def finish_reason(self, reason: str | None) -> str | None:
        """The finish reason for the client: `tool_calls` instead of `stop` if the message has tool calls."""
        return reason if self._calls is None else self._calls.finish_reason(reason)

    def _split(self, text: str, is_last: bool) -> ReasoningPiece:
        if self._reasoning is None:
            return ReasoningPiece("", text)
        parts = self._reasoning.feed(text)
        rest = self._reasoning.finish() if is_last else ReasoningPiece("", "")
        return ReasoningPiece(parts.reasoning + rest.reasoning, parts.content + rest.content)


def _located(part: Part, origins: Sequence[Origin]) -> list[Part]:
    """The part, with the place of its text in the whole text, in pieces that stand there."""
    if not isinstance(part, Content) or part.start is None:
        return [part]
    pieces: list[Part] = []
    end = part.start + len(part.text)
    for origin, following in pairwise([*origins, Origin(end, None)]):
        first, last = max(part.start, origin.position), min(end, following.position)
        if first < last:
            start = None if origin.start is None else origin.start + first - origin.position
            pieces.append(Content(part.text[first - part.start : last - part.start], start))
    return pieces


def _end_of(finish_reason: str | None, stop_reason: int | str | None) -> TextEnd | None:
    """How the text has ended; None if it hasn't. A token of the model completes the text, a stop string cuts it off."""
    if finish_reason is None:
        return None
    return TextEnd.COMPLETE if finish_reason == "stop" and not isinstance(stop_reason, str) else TextEnd.CUT_OFF
