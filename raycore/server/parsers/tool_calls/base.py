"""The base of all tool parsers: text in, deltas out. Text that may become a call is held back. Pure."""

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
"""White space between the parts of a call. Models write no more of it."""
_SPACE_BEFORE = r"[ \n]{1,4}"
"""White space between reasoning and a call: more than models write, so that none of it keeps them from the tag."""


@dataclass(frozen=True, slots=True)
class Content:
    """The next piece of the message's content."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The beginning of a call; its arguments follow. The index counts calls from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments: valid JSON only if the model wrote valid JSON."""

    index: int
    text: str


Delta = Content | CallStart | CallArguments


class ToolParser(ABC):
    """Reads one message. The same text gives the same message, however it is split into pieces.

    Text that looks like the beginning of a call is held back until its name is complete, or it turns out to be content.
    A call that was reported stays: its arguments are passed on as they arrive, even if they end as broken JSON. White
    space around calls belongs to them. If the message is cut off, the beginning of a call at its end is left out.
    """

    opening: ClassVar[str]
    """The tag before a call."""
    closing: ClassVar[str]
    """The tag that may follow a call, and is part of it."""
    needs_opening: ClassVar[bool] = True
    """Whether every call begins with `opening`."""

    def __init__(self, schemas: Schemas) -> None:
        self._schemas = schemas
        self._held = ""
        """Text that was fed but not reported yet."""
        self._opening_end = 0
        """Length of the opening tag at its beginning, with the white space before the tag."""
        self._num_calls = 0
        self._follows_call = False
        """Whether the last delta belongs to a call."""
        self._deltas: list[Delta] = []
        self._state: Callable[[bool], bool] = self._in_text
        """Takes what it can of `_held` and returns whether to go on. Its argument says that no more text follows."""
        self._is_cut_off = False

    @classmethod
    @abstractmethod
    def prefill(cls, name: str | None) -> str:
        """The beginning of a call, up to its arguments; without a name, up to the name.

        It ends at a token boundary of the model's, so that the model continues as usual.
        """

    @classmethod
    def has_grammar(cls, schemas: Schemas) -> bool:
        """Whether a grammar can express calls of these functions. Precondition of the methods that return grammars."""
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
            name: the function of the first call; None allows any.
            special: those of `opening` and `closing` that are special tokens.
            only_first: allow one call only.
            is_prefilled: the output begins after `prefill(name)`.
        """
        index = 0 if name is None else list(schemas).index(name)
        first = "call" if name is None else f"rest_{index}"
        if not is_prefilled:
            call = "call" if name is None else f"name_{index} rest_{index}"
            first = f"/{_SPACE_BEFORE}/? {cls._introduction()} {call}"
        return cls._grammar([f"start: {first} {_more(only_first)}"], schemas, special)

    @classmethod
    def calls_or_grammar(cls, schemas: Schemas, other: str, special: SpecialTokens, *, only_first: bool) -> str:
        """A grammar of a whole message that is either such calls or what the expression `other` allows."""
        rules = ["start: calls | other", f"calls: announced {_more(only_first)}", f"other: {other}"]
        return cls._grammar(rules, schemas, special)

    @classmethod
    def message_grammar(cls, schemas: Schemas, special: SpecialTokens) -> str | None:
        """A grammar of a whole message: text that may contain such calls. Whatever follows an opening tag is a call.

        None if calls may come without an opening tag.
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
        """Rules `name_N` and `rest_N` for each function, N being its position: together, a call after `prefill(None)`.

        `name_N` ends where `prefill` of that name ends, `rest_N` before `closing`.
        """

    @abstractmethod
    def begin(self, name: str) -> list[Delta]:
        """Continue after `prefill(name)`: all that follows is arguments."""

    def feed(self, text: str) -> list[Delta]:
        """What is certain once `text` has arrived."""
        self._held += text
        return self._run(is_last=False)

    def finish(self, is_cut_off: bool = False) -> list[Delta]:
        """The rest, when no more text follows.

        Args:
            is_cut_off: whether the model would have gone on, so that the beginning of a call is not content.
        """
        self._is_cut_off = is_cut_off
        return self._run(is_last=True)

    @abstractmethod
    def _in_head(self, is_last: bool) -> bool:
        """State: what is held begins with an opening tag, or with what may be a call without one."""

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
        """What is held is no call: report `num_read` characters as content and look for a call in the rest."""
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
    """Characters at the end of `text` that may begin the tag, with the white space before them."""
    return len(text) - len(text[: len(text) - num_begun(text, tag)].rstrip())


def is_name(value: object) -> TypeGuard[str]:
    """Whether this can be a function's name."""
    return isinstance(value, str) and bool(value) and is_text(value)


def is_text(value: str) -> bool:
    """Whether it can be encoded: JSON can also spell halves of surrogate pairs."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def as_json(value: Any) -> str:
    """JSON without escapes, except where the value contains halves of surrogate pairs."""
    written = json.dumps(value, ensure_ascii=False)
    return written if is_text(written) else json.dumps(value)
