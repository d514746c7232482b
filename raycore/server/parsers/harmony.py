"""Reads Harmony, the format in which gpt-oss writes: messages on channels, some of which are for tools. Pure.

A message is `<|start|>ROLE<|channel|>CHANNEL<|message|>BODY<|end|>`. What is before the body is its header. The prompt
ends with `<|start|>assistant`, so the text begins within a header. A header may name a recipient, ` to=functions.NAME`,
after the role or after the channel, and the body's type, `<|constrain|>json`. The last message ends with `<|return|>`,
or with `<|call|>` if it calls a tool.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from raycore.server.parsers.tags import num_begun

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
FUNCTIONS = "functions."
"""The names of the request's tools follow this in a recipient."""
_HEADER_TAGS = (START, CHANNEL, CONSTRAIN, MESSAGE)
_BODY_ENDS = (*ENDS, START, CHANNEL)
"""Models sometimes leave out the tag that ends a body."""
_FIRST = (*_HEADER_TAGS, f"to={FUNCTIONS}")
"""What a header begins with, if its beginning is in the prompt."""
_CHANNEL_NAME = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")
_RECIPIENT = re.compile(r"(?:^|[\s>])to=([^\s<]+)")


class Header(NamedTuple):
    """A message begins. Its body follows in pieces."""

    text: str
    """As the model has written it."""
    channel: str | None
    recipient: str | None

    @property
    def function(self) -> str | None:
        """The function that the message calls. None: it calls none of the request's."""
        if self.recipient is None or not self.recipient.startswith(FUNCTIONS):
            return None
        return self.recipient.removeprefix(FUNCTIONS) or None

    @property
    def is_reasoning(self) -> bool:
        """Whether the message isn't for the user or for a tool."""
        return self.channel == "analysis" and self.recipient is None


class Body(NamedTuple):
    """The next piece of a message's body."""

    text: str


class BodyEnd(NamedTuple):
    """A body ends with this tag. Empty: the next header begins at once, or the text ends."""

    text: str


Event = Header | Body | BodyEnd


class HarmonyReader:
    """Reads messages, piece by piece. How the text is split into pieces doesn't change the events' texts.

    Text that begins like no header is the body of a message whose header has no channel. A header at the end of the
    text that isn't complete is left out. Together, the texts of the events are all the rest.
    """

    def __init__(self, header: Header | None = None) -> None:
        """`header`: the text begins within the body of this message. None: within a header, or before one."""
        self._buffer = ""
        self._state = self._before_header if header is None else self._in_body

    def feed(self, text: str) -> list[Event]:
        """Take the next piece of text. Returns what is certain now."""
        return self._run(text, is_last=False)

    def finish(self) -> list[Event]:
        """End the text. Returns the rest."""
        return self._run("", is_last=True)

    def _run(self, text: str, is_last: bool) -> list[Event]:
        self._buffer += text
        events: list[Event] = []
        while self._buffer and self._state(events, is_last):
            pass
        return events

    def _before_header(self, events: list[Event], is_last: bool) -> bool:
        text = self._buffer.lstrip()
        if any(text.startswith(first) for first in _FIRST):
            self._state = self._in_header
            return True
        if not is_last and any(first.startswith(text) for first in _FIRST):
            return False
        events.append(Header("", None, None))
        self._state = self._in_body
        return True

    def _in_header(self, events: list[Event], is_last: bool) -> bool:
        written, tag, rest = self._buffer.partition(MESSAGE)
        if not tag:
            return False
        channel, recipient = _CHANNEL_NAME.search(written), _RECIPIENT.search(written)
        events.append(Header(written + tag, channel and channel[1], recipient and recipient[1]))
        self._buffer, self._state = rest, self._in_body
        return True

    def _in_body(self, events: list[Event], is_last: bool) -> bool:
        found = [(position, tag) for tag in _BODY_ENDS if (position := self._buffer.find(tag)) >= 0]
        num_undecided = 0 if is_last else max(num_begun(self._buffer, tag) for tag in _BODY_ENDS)
        position, tag = min(found) if found else (len(self._buffer) - num_undecided, "")
        if position:
            events.append(Body(self._buffer[:position]))
        self._buffer = self._buffer[position:]
        if found:
            tag = tag if tag in ENDS else ""
            events.append(BodyEnd(tag))
            self._buffer, self._state = self._buffer[len(tag) :], self._before_header
        return bool(found)


class Joined:
    """Says where a new line goes between the texts of several messages."""

    def __init__(self) -> None:
        self._has_text = self._is_new = False

    def begin(self) -> None:
        """Begin a message."""
        self._is_new = self._has_text

    def separator(self) -> str:
        """What comes before the next piece of a message: a new line if there has to be one."""
        separator = "\n" if self._is_new else ""
        self._has_text, self._is_new = True, False
        return separator
