"""What all tool parsers share: text in, deltas out, and text held back while it may become a call. Pure."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeGuard

from raycore.grammar.lark import SpecialTokens, mark
from raycore.server.parsers.tags import num_begun

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each function's parameters, by the function's name."""
_SPACE = r"[ \n]{1,2}"
"""What models write between the parts of a call, at most."""
_SPACE_BEFORE = r"[ \n]{1,4}"
"""Between a thought and a call: more than models write, so that the call's own token may always begin it."""


@dataclass(frozen=True, slots=True)
class Content:
    """More of the message's text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call, of which the arguments follow. Calls are counted from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments, which are JSON if the model wrote JSON."""

    index: int
    text: str


Delta = Content | CallStart | CallArguments


class ToolParser(ABC):
    """Reads one message. The same text gives the same message, however it is split into pieces.

    What looks like the beginning of a call is held back until it is one, or turns out to be text. From then on it isn't
    taken back: what a model writes as a call's arguments is passed on as it comes, even if that ends as broken JSON.
    White space around calls belongs to them.
    """

    opening: ClassVar[str]
    """Announces a call."""
    closing: ClassVar[str]
    """May follow a call, and is part of it."""
    is_announced: ClassVar[bool] = True
    """Whether `opening` stands before every call."""

    def __init__(self, schemas: Schemas) -> None:
        self._schemas = schemas
        self._held = ""
        """Text that came and of which nothing has been told yet."""
        self._opening_end = 0
        """How much of it announces the call that it may be."""
        self._num_calls = 0
        self._is_behind_call = False
        """Whether a call is the last that was told."""
        self._deltas: list[Delta] = []
        self._state: Callable[[bool], bool] = self._in_text
        """Takes what it understands off `_held`, and says whether to go on. Told that nothing follows, it decides."""

    @classmethod
    @abstractmethod
    def prefill(cls, name: str | None) -> str:
        """The beginning of a call: up to the arguments, or, without a name, up to the name.

        It ends where the model's own tokens end, so that the model goes on as it would have.
        """

    @classmethod
    def has_grammar(cls, schemas: Schemas) -> bool:
        """Whether calls of these functions can be said by one. The methods that make grammars want that to be so."""
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
        """What may follow `prefill(name)`, in Lark: a call, or several, with arguments by their functions' schemas.

        Unless it `is_prefilled`, that comes first. `special` are those of `opening` and `closing` that are special
        tokens.
        """
        index = 0 if name is None else list(schemas).index(name)
        first = "call" if name is None else f"rest_{index}"
        if not is_prefilled:
            call = "call" if name is None else f"name_{index} rest_{index}"
            first = f"/{_SPACE_BEFORE}/? {cls._announcement()} {call}"
        return cls._grammar([f"start: {first} {_more(only_first)}"], schemas, special)

    @classmethod
    def calls_or_grammar(cls, schemas: Schemas, other: str, special: SpecialTokens, *, only_first: bool) -> str:
        """The same of a whole message, which is such calls, or what the rule `other` says."""
        rules = ["start: calls | other", f"calls: announced {_more(only_first)}", f"other: {other}"]
        return cls._grammar(rules, schemas, special)

    @classmethod
    def message_grammar(cls, schemas: Schemas, special: SpecialTokens) -> str | None:
        """The same of a whole message, which may be text alone, or text with such calls.

        Whatever follows the announcement of a call is one. None where calls have no such mark.
        """
        if not cls.is_announced:
            return None
        until_opening = f"until_opening: TEXT {mark(cls.opening, special)}"
        if cls.opening not in special:
            until_opening = until_opening.replace(":", "[lazy]:", 1)
        rules = ["start: (until_opening SPACE? head call closing)* TEXT", until_opening]
        return cls._grammar(rules, schemas, special)

    @classmethod
    def _grammar(cls, rules: list[str], schemas: Schemas, special: SpecialTokens) -> str:
        rules += [
            f"opening: {mark(cls.opening, special)}",
            f"closing: SPACE? {mark(cls.closing, special)}",
            f"announced: {cls._announcement()} call",
            f"head: {json.dumps(cls.prefill(None).removeprefix(cls.opening).lstrip())}",
            f"call: {' | '.join(f'name_{index} rest_{index}' for index in range(len(schemas)))}",
            f"SPACE: /{_SPACE}/",
            r"TEXT: /(.|\n)*/",
        ]
        return "\n".join([*rules, *cls._call_rules(schemas)])

    @classmethod
    def _announcement(cls) -> str:
        return f"{'opening' if cls.is_announced else 'opening?'} SPACE? head"

    @classmethod
    @abstractmethod
    def _call_rules(cls, schemas: Schemas) -> list[str]:
        """Rules for each function, by its place: `name_N` and `rest_N` are a call from behind `prefill(None)` on.

        The name ends where `prefill` with it does, the rest before `closing`.
        """

    @abstractmethod
    def begin(self, name: str) -> list[Delta]:
        """Go on behind `prefill(name)`: what follows are the arguments, whatever it is."""

    def feed(self, text: str) -> list[Delta]:
        """What is known once `text` has come."""
        self._held += text
        return self._run(is_last=False)

    def finish(self) -> list[Delta]:
        """What remains when nothing follows."""
        return self._run(is_last=True)

    @abstractmethod
    def _in_head(self, is_last: bool) -> bool:
        """State: an announcement is at the beginning of what is held."""

    def _run(self, is_last: bool) -> list[Delta]:
        while self._held and self._state(is_last):
            pass
        deltas, self._deltas = self._deltas, []
        return deltas

    def _in_text(self, is_last: bool) -> bool:
        found = self._held.find(self.opening)
        if found >= 0:
            end = len(self._held[:found].rstrip())
            self._tell_content(end)
            self._opening_end = found + len(self.opening) - end
            self._state = self._in_head
            return True
        if is_last and self._is_behind_call and self._held.isspace():
            self._held = ""
        self._tell_content(len(self._held) if is_last else len(self._held) - num_undecided(self._held, self.opening))
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
        """It is no call: the first `num_read` characters are text, and the next call is looked for behind them."""
        self._tell_content(num_read)
        self._state = self._in_text

    def _tell_content(self, num: int) -> None:
        if num:
            self._deltas.append(Content(self._held[:num]))
            self._held = self._held[num:]
            self._is_behind_call = False

    def _start_call(self, name: str) -> None:
        self._deltas.append(CallStart(self._num_calls, name))
        self._num_calls += 1
        self._is_behind_call = True

    def _tell_arguments(self, text: str) -> None:
        if text:
            self._deltas.append(CallArguments(self._num_calls - 1, text))


def _more(only_first: bool) -> str:
    return "closing?" if only_first else "(closing SPACE? announced)* closing?"


def num_undecided(text: str, marker: str) -> int:
    """Characters at the end of `text` that may begin the marker, with the white space before them."""
    return len(text) - len(text[: len(text) - num_begun(text, marker)].rstrip())


def is_name(value: object) -> TypeGuard[str]:
    """Whether a function can be called that."""
    return isinstance(value, str) and bool(value) and is_text(value)


def is_text(value: str) -> bool:
    """Whether it can be sent: JSON can write halves of characters, too."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def as_json(value: Any) -> str:
    """JSON with characters as themselves, where all of them are some."""
    written = json.dumps(value, ensure_ascii=False)
    return written if is_text(written) else json.dumps(value)
