"""A sequence's text as a chat message: what is thought is taken off before tool calls are looked for."""

from __future__ import annotations

from typing import Any

from raycore.server.chat.reasoning import Thinking
from raycore.server.chat.tools import MessageReader, ToolUse
from raycore.server.parsers.reasoning import Parts


class ChoiceReader:
    """Turns the text of one choice, while it comes, into what clients are told."""

    def __init__(self, thinking: Thinking | None, tools: ToolUse | None) -> None:
        self._thoughts = None if thinking is None else thinking.reader()
        self._tells_thoughts = thinking is not None and thinking.is_told
        self._calls = None if tools is None else MessageReader(tools)

    def read(self, text: str, finish_reason: str | None) -> list[dict[str, Any]]:
        """What is new, as values of a streamed choice's `delta`, once more text has come.

        Raises:
            APIError: a function had to be called, and none was.
        """
        thought, said = self._split(text, finish_reason)
        deltas: list[dict[str, Any]] = [{"reasoning": thought}] if thought and self._tells_thoughts else []
        if self._calls is not None:
            return deltas + self._calls.read(said, finish_reason)
        return [*deltas, {"content": said}] if said else deltas

    def message(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        """A message that is complete, without its role. Raises APIError as `read` does."""
        thought, said = self._split(text, finish_reason)
        message: dict[str, Any] = {"content": said} if self._calls is None else self._calls.message(said, finish_reason)
        if thought and not message["content"]:
            message["content"] = None
        return {"reasoning": thought or None, **message} if self._tells_thoughts else message

    def finish_reason(self, reason: str | None) -> str | None:
        """A message that ended by itself and called tools ended for that."""
        return reason if self._calls is None else self._calls.finish_reason(reason)

    def _split(self, text: str, finish_reason: str | None) -> Parts:
        if self._thoughts is None:
            return Parts("", text)
        thought, said = self._thoughts.feed(text)
        if not finish_reason:
            return Parts(thought, said)
        rest = self._thoughts.finish()
        return Parts(thought + rest.reasoning, said + rest.content)
