"""Turns the parts of an answer into content blocks: whole ones, or the events of a stream. Pure."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any, cast

from pydantic_core import from_json

from raycore.server.chat.parts import CallBegin, Part, ReasoningText
from raycore.server.parsers.tool_calls import CallArguments, Content

Event = dict[str, Any]

_FIELDS = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}
"""By type of a block: the field of a delta that has its text."""
_INVALID = "INVALID_JSON"
"""The field of a call's input for arguments that aren't a JSON object: Anthropic's documentation gives it this name."""


class BlockWriter:
    """Writes the blocks of one answer, as events.

    An answer without text, reasoning and calls has one block, with an empty text: clients read the first block.
    """

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        """The blocks so far. The last one may be incomplete."""
        self._text: list[str] = []
        """What the deltas of the last block have, in pieces."""
        self._is_open = False

    def write(self, parts: Sequence[Part]) -> list[Event]:
        """The events for the next parts."""
        events: list[Event] = []
        for part in parts:
            if isinstance(part, CallBegin):
                events += self._begin({"type": "tool_use", "id": part.id, "name": part.name, "input": {}})
            elif isinstance(part, CallArguments):
                events += self._add("tool_use", part.text)
            elif isinstance(part, ReasoningText):
                events += self._add("thinking", part.text)
            else:
                assert isinstance(part, Content)
                events += self._add("text", part.text)
        return events

    def finish(self, *, is_cut_off: bool = False) -> list[Event]:
        """The events that end the last block.

        Args:
            is_cut_off: whether the answer was cut off, so that the arguments of its last call may be incomplete.
        """
        events = [] if self.blocks else self._begin({"type": "text", "text": ""})
        return events + self._end(is_cut_off)

    @property
    def is_call_complete(self) -> bool:
        """Whether the answer's last block is a call, with complete arguments."""
        return bool(self.blocks) and self.blocks[-1]["type"] == "tool_use" and _object("".join(self._text)) is not None

    def _add(self, kind: str, text: str) -> list[Event]:
        events: list[Event] = []
        if not self._is_open or self.blocks[-1]["type"] != kind:
            assert kind != "tool_use", "a call begins before its arguments"
            signature = {"signature": ""} if kind == "thinking" else {}
            events += self._begin({"type": kind, kind: "", **signature})
        self._text.append(text)
        type_ = "input_json_delta" if kind == "tool_use" else f"{kind}_delta"
        return [*events, self._event("content_block_delta", delta={"type": type_, _FIELDS[kind]: text})]

    def _begin(self, block: dict[str, Any]) -> list[Event]:
        events = self._end(is_cut_off=False)
        self.blocks.append(block)
        self._is_open = True
        return [*events, self._event("content_block_start", content_block=dict(block))]

    def _end(self, is_cut_off: bool) -> list[Event]:
        if not self._is_open:
            return []
        self._is_open = False
        block, text = self.blocks[-1], "".join(self._text)
        events: list[Event] = []
        if block["type"] == "tool_use":
            block["input"] = _input(text, is_cut_off)
        else:
            block[block["type"]] = text
        if block["type"] == "thinking":
            # nobody checks it, but clients drop reasoning without one
            block["signature"] = uuid.uuid4().hex
            delta = {"type": "signature_delta", "signature": block["signature"]}
            events.append(self._event("content_block_delta", delta=delta))
        self._text = []
        return [*events, self._event("content_block_stop")]

    def _event(self, type_: str, **fields: Any) -> Event:
        return {"type": type_, "index": len(self.blocks) - 1, **fields}


def _input(arguments: str, is_cut_off: bool) -> dict[str, Any]:
    """A call's arguments as an object. If they were cut off, as much of it as there is."""
    found = _object(arguments.strip() or "{}")
    if found is None and is_cut_off:
        try:
            partial: Any = from_json(arguments, allow_partial=True)
        except ValueError:
            partial = None
        found = cast("dict[str, Any]", partial) if isinstance(partial, dict) else None
    return {_INVALID: arguments} if found is None else found


def _object(text: str) -> dict[str, Any] | None:
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None
