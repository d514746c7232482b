"""Turns the text of a choice into a chat message: first separates the reasoning, then finds tool calls in the rest."""

from __future__ import annotations

from typing import Any

from raycore.server.chat.reasoning import Reasoning
from raycore.server.chat.tools import End, MessageReader
from raycore.server.parsers.reasoning import Parts


class ChoiceReader:
    """Turns the text of one choice into a chat message, or into a stream's deltas while the text arrives."""

    def __init__(self, reasoning: Reasoning | None, calls: MessageReader | None) -> None:
        self._reasoning = None if reasoning is None else reasoning.reader()
        self._includes_reasoning = reasoning is not None and reasoning.is_included
        self._calls = calls

    def read(self, text: str, finish_reason: str | None, stop_reason: int | str | None) -> list[dict[str, Any]]:
        """Take the next piece of text. Returns the values of `delta` for the events of the stream.

        Raises:
            APIError: the model did not make a required tool call.
        """
        end = _end_of(finish_reason, stop_reason)
        reasoning, content = self._split(text, is_last=end is not None)
        deltas: list[dict[str, Any]] = [{"reasoning": reasoning}] if reasoning and self._includes_reasoning else []
        if self._calls is not None:
            return deltas + self._calls.read(content, end)
        return [*deltas, {"content": content}] if content else deltas

    def message(self, text: str, finish_reason: str | None, stop_reason: int | str | None) -> dict[str, Any]:
        """Take the whole text. Returns the complete message, without its role.

        Raises:
            APIError: the model did not make a required tool call.
        """
        reasoning, content = self._split(text, is_last=True)
        end = _end_of(finish_reason, stop_reason) or End.COMPLETE
        message: dict[str, Any] = {"content": content} if self._calls is None else self._calls.message(content, end)
        if reasoning and not message["content"]:
            message["content"] = None
        return {"reasoning": reasoning or None, **message} if self._includes_reasoning else message

    def finish_reason(self, reason: str | None) -> str | None:
        """The finish reason for the client: `tool_calls` instead of `stop` if the message has tool calls."""
        return reason if self._calls is None else self._calls.finish_reason(reason)

    def _split(self, text: str, is_last: bool) -> Parts:
        if self._reasoning is None:
            return Parts("", text)
        parts = self._reasoning.feed(text)
        rest = self._reasoning.finish() if is_last else Parts("", "")
        return Parts(parts.reasoning + rest.reasoning, parts.content + rest.content)


def _end_of(finish_reason: str | None, stop_reason: int | str | None) -> End | None:
    """How the text has ended; None if it hasn't. A token of the model completes the text, a stop string cuts it off."""
    if finish_reason is None:
        return None
    return End.COMPLETE if finish_reason == "stop" and not isinstance(stop_reason, str) else End.CUT_OFF
