"""The base class of all tool parsers, which turn text into deltas: content, starts of calls, arguments. Pure."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeGuard

from raycore.grammar.lark import SpecialTokens, tag_rule
from raycore.server.parsers.tags import num_begun

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each function's parameters, by the function's name."""
_SPACE = r"[ \n]{1,2}"
"""White space that grammars allow between the parts of a call. Models write no more than this."""
_SPACE_BEFORE = r"[ \n]{1,4}"
"""White space that grammars allow between reasoning and a call. Models write less than this."""


@dataclass(frozen=True, slots=True)
class Content:
    """The next piece of the message's content."""

    text: str


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


class ToolParser(ABC):
    """Reads one message, piece by piece. How the text is split into pieces doesn't change the message.

    Text that looks like the beginning of a call is held back until the function's name is complete, or until the text
    turns out to be content. A call that was reported is never taken back: its arguments are passed on as they arrive,
    even if they turn out to be broken JSON. White space around a call belongs to the call. If the message is cut off
    before a function's name is complete, that beginning of a call is left out.
    """

    opening: ClassVar[str]
    """The tag before a call. It belongs to the call."""
    closing: ClassVar[str]
    """The tag that may follow a call. It belongs to the call."""
    needs_opening: ClassVar[bool] = True
    """Whether every call begins with `opening`."""

    def __init__(self, schemas: Schemas) -> None:
        self._schemas = schemas
        self._held = ""
        """Text that has arrived but hasn't been reported yet."""
        self._opening_end = 0
        """Where the opening tag with which `_held` begins ends, including white space before the tag."""
        self._num_calls = 0
        self._follows_call = False
        """Whether the last delta belongs to a call."""
        self._deltas: list[Delta] = []
        self._state: Callable[[bool], bool] = self._in_text
        """The parser's current state, a method. It takes what it can of `_held`, may set another state, and returns
        whether to go on. Its argument says whether no more text follows."""
        self._is_cut_off = False

    @classmethod
    @abstractmethod
    def prefill(cls, name: str | None) -> str:
        """The text of the beginning of a call: up to the arguments, or if `name` is None, up to the function's name.

        The text ends where a token of the model would end, so that the model continues as usual.
        """

    @classmethod
    def has_grammar(cls, schemas: Schemas) -> bool:
        """Whether a grammar can express calls of these functions. If not, call no method that returns a grammar."""
        return True

    @classmethod
    def calls_grammar(
        cls,
        schemas: Schemas,
        name: str | None,
        special: SpecialTokens,
        *,
        only_first: bool,
        is_prefilled: bool = True,
    ) -> str:
        """A Lark grammar of one or more calls whose arguments follow their functions' schemas.

        Args:
            name: the function of the first call; None: any of the functions.
            special: those of the tags `opening` and `closing` that are special tokens.
            only_first: whether only one call is allowed.
            is_prefilled: whether the prompt ends with `prefill(name)`, so that the output begins inside a call.
        """
        index = 0 if name is None else list(schemas).index(name)
        first = "call" if name is None else f"rest_{index}"
        if not is_prefilled:
            call = "call" if name is None else f"name_{index} rest_{index}"
            first = f"/{_SPACE_BEFORE}/? {cls._introduction()} {call}"
        return cls._grammar([f"start: {first} {_more(only_first)}"], schemas, special)

    @classmethod
    def calls_or_grammar(cls, schemas: Schemas, other: str, special: SpecialTokens, *, only_first: bool) -> str:
        """A Lark grammar of a whole message that is either calls, as in `calls_grammar`, or what `other` allows.

        `other`: the body of a Lark rule.
        """
        rules = ["start: calls | other", f"calls: announced {_more(only_first)}", f"other: {other}"]
        return cls._grammar(rules, schemas, special)

    @classmethod
    def message_grammar(cls, schemas: Schemas, special: SpecialTokens) -> str | None:
        """A Lark grammar of a whole message: any text, with or without calls as in `calls_grammar`.

        After an opening tag, there must be a call. Returns None if the format lets a call lack the opening tag.
        """
        if not cls.needs_opening:
            return None
        until_opening = f"until_opening: TEXT {tag_rule(cls.opening, special)}"
        if cls.opening not in special:
            until_opening = until_opening.replace(":", "[lazy]:", 1)
        rules = ["start: (until_opening SPACE? head call closing)* TEXT", until_opening]
        return cls._grammar(rules, schemas, special)

    @classmethod
    def _grammar(cls, rules: list[str], schemas: Schemas, special: SpecialTokens) -> str:
        rules += [
            f"opening: {tag_rule(cls.opening, special)}",
            f"closing: SPACE? {tag_rule(cls.closing, special)}",
            f"announced: {cls._introduction()} call",
            f"head: {json.dumps(cls.prefill(None).removeprefix(cls.opening).lstrip())}",
            f"call: {' | '.join(f'name_{index} rest_{index}' for index in range(len(schemas)))}",
            f"SPACE: /{_SPACE}/",
            r"TEXT: /(.|\n)*/",
        ]
        return "\n".join([*rules, *cls._call_rules(schemas)])

    @classmethod
    def _introduction(cls) -> str:
        return f"{'opening' if cls.needs_opening else 'opening?'} SPACE? head"

    @classmethod
    @abstractmethod
    def _call_rules(cls, schemas: Schemas) -> list[str]:
        """The rules `name_N` and `rest_N` for each function, where N is the function's position in `schemas`.

        Together they match the text of a call after `prefill(None)`. `name_N` ends where `prefill(name)` ends, `rest_N`
        before the tag `closing`.
        """

    @abstractmethod
    def begin(self, name: str) -> list[Delta]:
        """Begin inside a call, after `prefill(name)`: the text begins with the arguments. Returns the first deltas."""

    def feed(self, text: str) -> list[Delta]:
        """Take the next piece of text. Returns the deltas that are certain now."""
        self._held += text
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
        """The state in which `_held` begins with an opening tag, or with what may be a call without an opening tag."""

    def _run(self, is_last: bool) -> list[Delta]:
        while self._held and self._state(is_last):
            pass
        deltas, self._deltas = self._deltas, []
        return deltas

    def _in_text(self, is_last: bool) -> bool:
        found = self._held.find(self.opening)
        if found >= 0:
            end = len(self._held[:found].rstrip())
            self._report_content(end)
            self._opening_end = found + len(self.opening) - end
            self._state = self._in_head
            return True
        num_left = num_undecided(self._held, self.opening)
        if is_last and self._is_cut_off and num_begun(self._held, self.opening):
            self._held = self._held[:-num_left]
        if is_last and self._follows_call and self._held.isspace():
            self._held = ""
        self._report_content(len(self._held) - (0 if is_last else num_left))
        return False

    def _before_closing(self, is_last: bool) -> bool:
        rest = self._held.lstrip()
        if rest.startswith(self.closing):
            self._held = rest[len(self.closing) :]
        elif self.closing.startswith(rest):
            if is_last:
                self._held = ""
            return False
        self._state = self._between_calls
        return True

    def _between_calls(self, is_last: bool) -> bool:
        self._state = self._in_text
        return True

    def _give_up(self, num_read: int) -> None:
        """Report the first `num_read` characters of `_held` as content, because no call begins there."""
        self._report_content(num_read)
        self._state = self._in_text

    def _report_content(self, num: int) -> None:
        if num:
            self._deltas.append(Content(self._held[:num]))
            self._held = self._held[num:]
            self._follows_call = False

    def _start_call(self, name: str) -> None:
        self._deltas.append(CallStart(self._num_calls, name))
        self._num_calls += 1
        self._follows_call = True

    def _report_arguments(self, text: str) -> None:
        if text:
            self._deltas.append(CallArguments(self._num_calls - 1, text))


def _more(only_first: bool) -> str:
    return "closing?" if only_first else "(closing SPACE? announced)* closing?"


def num_undecided(text: str, tag: str) -> int:
    """How many characters at the end of `text` may be the beginning of the tag, or white space before the tag."""
    return len(text) - len(text[: len(text) - num_begun(text, tag)].rstrip())


def is_name(value: object) -> TypeGuard[str]:
    """Whether a value from JSON can be a function's name."""
    return isinstance(value, str) and bool(value) and is_text(value)


def is_text(value: str) -> bool:
    """Whether a string can be encoded as UTF-8. Strings from JSON may contain halves of surrogate pairs."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def as_json(value: Any) -> str:
    """Encode a value as JSON. Characters outside of ASCII are escaped only if there are halves of surrogate pairs."""
    written = json.dumps(value, ensure_ascii=False)
    return written if is_text(written) else json.dumps(value)
