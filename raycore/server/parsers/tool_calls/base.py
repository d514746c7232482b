"""The base class of all tool parsers, which turn text into deltas: content, starts of calls, arguments. Pure."""

from __future__ import annotations

import json
import uuid
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeGuard

from raycore.sampling_params import is_encodable
from raycore.server.parsers.tags import num_begun
from raycore.server.parsers.tool_calls.call_grammar import CallGrammar, Schemas
from raycore.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Content:
    """The next piece of the message's content."""

    text: str
    start: int | None = field(default=None, compare=False)
    """Where it begins in the text that was read, in characters. None: it isn't there as it is, so that no tokens belong
    to it."""


@dataclass(frozen=True, slots=True)
class CallStart:
    """The beginning of a call. The call's arguments follow. `index` is the call's number in the message, from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the arguments of call `index`. If the model writes invalid JSON, the pieces are invalid."""

    index: int
    text: str


Delta = Content | CallStart | CallArguments


class ToolParser(CallGrammar):
    """Reads one message, piece by piece. How the text is split into pieces doesn't change the message.

    Text that looks like the beginning of a call is held back until the function's name is complete, or until the text
    turns out to be content. A call that was reported is never taken back: its arguments are passed on as they arrive,
    even if they turn out to be broken JSON. White space around a call belongs to the call. If the message is cut off
    before a function's name is complete, that beginning of a call is left out. Text that looks like a call but isn't
    one stays in the content as it is.
    """

    is_closed_by_tag: ClassVar[bool] = False
    """Whether `closing` is a tag that closes the call, even if other text comes between the two."""

    def __init__(self, schemas: Schemas) -> None:
        self._schemas = schemas
        self._buffer: str = ""
        """Text that has arrived but hasn't been reported yet: the end of all that was fed."""
        self._num_fed = 0
        """Number of characters that have arrived."""
        self._opening_end = 0
        """Where the opening tag with which `_buffer` begins ends, including white space before the tag."""
        self._has_opening = False
        """Whether the call that is being read begins with an opening tag."""
        self._num_calls = 0
        self._is_after_call = False
        """Whether the last delta belongs to a call."""
        self._is_open = False
        """Whether the last call still lacks its closing tag."""
        self._deltas: list[Delta] = []
        self._state: Callable[[bool], bool] = self._in_text
        """The parser's current state, a method. It takes what it can of `_buffer`, may set another state, and returns
        whether to go on. Its argument says whether no more text follows."""
        self._is_cut_off = False

    @classmethod
    def as_written(cls, calls: str) -> type[ToolParser]:
        """The parser for the variant of this format in which the chat template writes these calls."""
        return cls

    @classmethod
    def for_tokenizer(cls, tokenizer: Tokenizer) -> type[ToolParser]:
        """The parser for a model with this tokenizer."""
        return cls

    @classmethod
    def call_id(cls) -> str:
        """A new id for a call."""
        return f"call_{uuid.uuid4().hex[:24]}"

    @abstractmethod
    def begin(self, name: str) -> list[Delta]:
        """Begin inside a call, after `prefill(name)`: the text begins with the arguments. Returns the first deltas."""

    def feed(self, text: str) -> list[Delta]:
        """Take the next piece of text. Returns the deltas that are certain now."""
        self._buffer += text
        self._num_fed += len(text)
        return self._run(is_last=False)

    def finish(self, is_cut_off: bool = False) -> list[Delta]:
        """End the message. Returns the remaining deltas.

        Args:
            is_cut_off: whether the text was cut off, so that the beginning of a call at its end is not content.
        """
        self._is_cut_off = is_cut_off
        return self._run(is_last=True)

    @abstractmethod
    def _in_head(self, is_last: bool) -> bool:
        """The state in which `_buffer` begins with an opening tag, or with what may be a call without one."""

    def _run(self, is_last: bool) -> list[Delta]:
        while self._buffer and self._state(is_last):
            pass
        deltas, self._deltas = self._deltas, []
        return deltas

    def _in_text(self, is_last: bool) -> bool:
        tags = [*self._openings(), *(self._closings() if self._is_open else ())]
        found = [(position, tag) for tag in tags if (position := self._buffer.find(tag)) >= 0]
        if found:
            self._begin_tag(*min(found))
            return True
        end = len(self._buffer) - max(num_undecided(self._buffer, tag) for tag in tags)
        if is_last:
            is_begun = self._is_cut_off and any(num_begun(self._buffer, tag) for tag in tags)
            end = end if is_begun else len(self._buffer)
            end = 0 if self._is_after_call and self._buffer[:end].isspace() else end
        self._report_content(end)
        self._buffer = "" if is_last else self._buffer
        return False

    def _begin_tag(self, position: int, tag: str) -> None:
        end = len(self._buffer[:position].rstrip())
        self._report_content(end)
        self._opening_end = position + len(tag) - end
        self._has_opening = tag == self.opening
        if tag in (self.opening, self.closing):
            self._is_open = False
        if tag in self._closings():
            self._buffer = self._buffer[self._opening_end :]
        else:
            self._state = self._in_head

    def _openings(self) -> tuple[str, ...]:
        """The tags with which a call may begin."""
        return (self.opening,)

    def _closings(self) -> tuple[str, ...]:
        """The tags that close a call, wherever they come before the next call."""
        return (self.closing,)

    def _before_closing(self, is_last: bool) -> bool:
        rest = self._buffer.lstrip()
        if rest.startswith(self.closing):
            self._buffer = rest[len(self.closing) :]
            self._is_open = False
        elif self.closing.startswith(rest):
            if is_last:
                self._buffer = ""
            return False
        self._state = self._between_calls
        return True

    def _between_calls(self, is_last: bool) -> bool:
        self._state = self._in_text
        return True

    def _give_up(self, num_read: int) -> None:
        """Report the first `num_read` characters of `_buffer` as content, because no call begins there."""
        self._report_content(num_read)
        self._state = self._in_text

    def _report_content(self, num: int) -> None:
        if num:
            self._deltas.append(Content(self._buffer[:num], self._num_fed - len(self._buffer)))
            self._buffer = self._buffer[num:]
            self._is_after_call = False

    def _start_call(self, name: str) -> None:
        self._deltas.append(CallStart(self._num_calls, name))
        self._num_calls += 1
        self._is_after_call = True
        self._is_open = self.is_closed_by_tag

    def _report_arguments(self, text: str) -> None:
        if text:
            self._deltas.append(CallArguments(self._num_calls - 1, text))


def num_undecided(text: str, tag: str) -> int:
    """How many characters at the end of `text` may be the beginning of the tag, or white space before the tag."""
    return len(text) - len(text[: len(text) - num_begun(text, tag)].rstrip())


def is_name(value: object) -> TypeGuard[str]:
    """Whether a value from JSON can be a function's name."""
    return isinstance(value, str) and bool(value) and is_encodable(value)


def as_json(value: Any) -> str:
    """Encode a value as JSON. Characters outside of ASCII are escaped only if there are halves of surrogate pairs."""
    written = json.dumps(value, ensure_ascii=False)
    return written if is_encodable(written) else json.dumps(value)
