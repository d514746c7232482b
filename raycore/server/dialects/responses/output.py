"""Turns the parts of a message into the items of a response's output, and into the events of its stream. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from raycore.server.chat.parts import CallBegin, MessageDelta, Part, ReasoningText
from raycore.server.dialects.responses.conversation import new_id
from raycore.server.dialects.responses.text_logprobs import TextLogprobs
from raycore.server.parsers.tool_calls import CallArguments, Content

Event = dict[str, Any]
"""An event of the stream, without its number."""


class OutputItems:
    """The items of one response's output, while the parts of the message arrive."""

    def __init__(self, logprobs: TextLogprobs | None, *, includes_reasoning: bool) -> None:
        self.done: list[dict[str, Any]] = []
        """The items that are complete."""
        self._logprobs = logprobs
        self._includes_reasoning = includes_reasoning
        self._open: _OpenItem | None = None

    def read(self, delta: MessageDelta) -> list[Event]:
        """Take the next parts. Returns the events that tell of them."""
        if self._logprobs is not None:
            self._logprobs.add(delta)
        return [event for part in delta.parts for event in self._read(part)]

    def finish(self, status: str) -> list[Event]:
        """End the output. `status` is that of the last item: `completed` or `incomplete`."""
        events = self._close(status)
        if status == "completed" and all(item["type"] == "reasoning" for item in self.done):
            events += [*self._begin(_Message()), *self._close(status)]  # the model wrote no text and no call
        return events

    def _read(self, part: Part) -> list[Event]:
        if isinstance(part, ReasoningText):
            if not self._includes_reasoning:
                return []
            begun = [] if isinstance(self._open, _ReasoningItem) else self._begin(_ReasoningItem())
            return [*begun, *self._add(part.text)]
        if isinstance(part, Content):
            begun = [] if isinstance(self._open, _Message) else self._begin(_Message())
            return [*begun, *self._add(part.text, [] if self._logprobs is None else self._logprobs.take(part))]
        if isinstance(part, CallBegin):
            return self._begin(_Call(part.id, part.name))
        assert isinstance(part, CallArguments)
        return self._add(part.text)

    def _begin(self, item: _OpenItem) -> list[Event]:
        events = self._close("completed")
        item.output_index = len(self.done)
        self._open = item
        return [*events, *item.begin()]

    def _add(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> list[Event]:
        assert self._open is not None
        return self._open.add(text, logprobs)

    def _close(self, status: str) -> list[Event]:
        if self._open is None:
            return []
        closed, self._open = self._open, None
        events = closed.end(status)
        self.done.append(closed.item(status))
        return events


class _OpenItem(ABC):
    """An item to which more is added."""

    kind: str

    def __init__(self) -> None:
        self.id = new_id(self.kind)
        self.output_index = 0
        self._text = ""
        self._logprobs: list[dict[str, Any]] = []

    @abstractmethod
    def item(self, status: str) -> dict[str, Any]:
        """The item as it is now."""

    def begin(self) -> list[Event]:
        """The events with which the item begins."""
        empty = self._without_parts()
        return [{"type": "response.output_item.added", "output_index": self.output_index, "item": empty}]

    def add(self, text: str, logprobs: Sequence[dict[str, Any]]) -> list[Event]:
        """Add a text. Returns the event that tells of it."""
        self._text += text
        self._logprobs += logprobs
        return [self._event(self._delta, delta=text, **self._shown(logprobs))]

    def end(self, status: str) -> list[Event]:
        """The events with which the item ends."""
        done = {"type": "response.output_item.done", "output_index": self.output_index, "item": self.item(status)}
        return [*self._last(), done]

    _delta: str

    @abstractmethod
    def _last(self) -> list[Event]: ...

    def _without_parts(self) -> dict[str, Any]:
        return self.item("in_progress")

    def _shown(self, logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {}

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "item_id": self.id, "output_index": self.output_index, **fields}


class _TextItem(_OpenItem):
    """An item with one part of text."""

    _done: str

    def begin(self) -> list[Event]:
        return [*super().begin(), self._event("response.content_part.added", content_index=0, part=self._part())]

    def _event(self, kind: str, **fields: Any) -> Event:
        return super()._event(kind, **{"content_index": 0, **fields})

    def _last(self) -> list[Event]:
        return [
            self._event(self._done, text=self._text, **self._shown(self._logprobs)),
            self._event("response.content_part.done", part=self._part()),
        ]

    def _without_parts(self) -> dict[str, Any]:
        return {**self.item("in_progress"), "content": []}

    @abstractmethod
    def _part(self) -> dict[str, Any]: ...


class _Message(_TextItem):
    kind = "message"
    _delta, _done = "response.output_text.delta", "response.output_text.done"

    def item(self, status: str) -> dict[str, Any]:
        return {"id": self.id, "type": self.kind, "status": status, "role": "assistant", "content": [self._part()]}

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": list(self._logprobs)}

    def _shown(self, logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"logprobs": list(logprobs)}


class _ReasoningItem(_TextItem):
    kind = "reasoning"
    _delta, _done = "response.reasoning_text.delta", "response.reasoning_text.done"

    def item(self, status: str) -> dict[str, Any]:
        fields = {"summary": [], "content": [self._part()], "encrypted_content": None, "status": status}
        return {"id": self.id, "type": self.kind, **fields}

    def _part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self._text}


class _Call(_OpenItem):
    kind = "function_call"
    _delta = "response.function_call_arguments.delta"

    def __init__(self, call_id: str, name: str) -> None:
        super().__init__()
        self._call_id, self._name = call_id, name

    def item(self, status: str) -> dict[str, Any]:
        called = {"call_id": self._call_id, "name": self._name, "arguments": self._text}
        return {"id": self.id, "type": self.kind, "status": status, **called}

    def _last(self) -> list[Event]:
        fields = {"name": self._name, "arguments": self._text}
        return [self._event("response.function_call_arguments.done", **fields)]
