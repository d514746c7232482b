"""How a format writes tool calls: as text for a prompt, and as a grammar for the output. Pure."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from raycore.parts.constraints.grammar.lark import SpecialTokens, tag_rule

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each function's parameters, by the function's name."""
_SPACE = r"[ \n]{1,2}"
"""White space that grammars allow between the parts of a call. Models write no more than this."""
_SPACE_BEFORE = r"[ \n]{1,4}"
"""White space that grammars allow between reasoning and a call. Models write less than this."""


class CallGrammar(ABC):
    """How a format writes calls."""

    opening: ClassVar[str]
    """The tag before a call. It belongs to the call."""
    closing: ClassVar[str]
    """The text that may follow a call. It belongs to the call."""
    needs_opening: ClassVar[bool] = True
    """Whether every call begins with `opening`."""
    next_call: ClassVar[str] = "closing SPACE? announced"
    """Body of a grammar rule: what stands between a call and the end of the next one."""
    last: ClassVar[str] = "closing?"
    """Body of a grammar rule: what stands after the last call of a message."""
    in_text: ClassVar[str] = "call closing"
    """Body of a grammar rule: calls between texts, from the first function's name on."""

    @classmethod
    def tags(cls) -> tuple[str, ...]:
        """The format's tags. Those that are special tokens have to be in the output's text."""
        return (cls.opening, cls.closing)

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
            special: those of `tags()` that are special tokens.
            only_first: whether only one call is allowed.
            is_prefilled: whether the prompt ends with `prefill(name)`, so that the output begins inside a call.
        """
        index = 0 if name is None else list(schemas).index(name)
        first = "call" if name is None else f"rest_{index}"
        if not is_prefilled:
            call = "call" if name is None else f"name_{index} rest_{index}"
            first = f"/{_SPACE_BEFORE}/? {cls._introduction()} {call}"
        return cls._grammar([f"start: {first} {cls._more(only_first)}"], schemas, special)

    @classmethod
    def calls_or_grammar(cls, schemas: Schemas, other: str, special: SpecialTokens, *, only_first: bool) -> str:
        """A Lark grammar of a whole message that is either calls, as in `calls_grammar`, or what `other` allows.

        `other`: the body of a Lark rule.
        """
        rules = ["start: calls | other", f"calls: announced {cls._more(only_first)}", f"other: {other}"]
        return cls._grammar(rules, schemas, special)

    @classmethod
    def message_grammar(cls, schemas: Schemas, special: SpecialTokens) -> str | None:
        """A Lark grammar of a whole message: any text, with or without calls as in `calls_grammar`.

        After an opening tag, there must be a call. Returns None if the format lets a call lack the opening tag.
        """
        if not cls.needs_opening:
            return None
        rules = [f"start: (until_opening SPACE? head {cls.in_text})* TEXT", cls._until_opening(special)]
        return cls._grammar(rules, schemas, special)

    @classmethod
    def _until_opening(cls, special: SpecialTokens) -> str:
        name = "until_opening" if cls.opening in special else "until_opening[lazy]"
        return f"{name}: TEXT {cls._opening_rule(special)}"

    @classmethod
    def _opening_rule(cls, special: SpecialTokens) -> str:
        """The body of a grammar rule that matches `opening`."""
        return tag_rule(cls.opening, special)

    @classmethod
    def _grammar(cls, rules: list[str], schemas: Schemas, special: SpecialTokens) -> str:
        rules += [
            f"opening: {cls._opening_rule(special)}",
            f"closing: SPACE? {tag_rule(cls.closing, special)}",
            f"announced: {cls._introduction()} call",
            f"head: {json.dumps(cls.prefill(None).removeprefix(cls.opening).lstrip())}",
            f"call: {' | '.join(f'name_{index} rest_{index}' for index in range(len(schemas)))}",
            f"SPACE: /{_SPACE}/",
            r"TEXT: /(.|\n)*/",
        ]
        return "\n".join([*rules, *cls._call_rules(schemas, special)])

    @classmethod
    def _introduction(cls) -> str:
        return f"{'opening' if cls.needs_opening else 'opening?'} SPACE? head"

    @classmethod
    def _more(cls, only_first: bool) -> str:
        return cls.last if only_first else f"({cls.next_call})* {cls.last}"

    @classmethod
    @abstractmethod
    def _call_rules(cls, schemas: Schemas, special: SpecialTokens) -> list[str]:
        """The rules `name_N` and `rest_N` for each function, where N is the function's position in `schemas`.

        Together they match the text of a call after `prefill(None)`. `name_N` ends where `prefill(name)` ends, `rest_N`
        before the text `closing`.
        """
