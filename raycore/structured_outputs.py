"""Constraints on outputs. Names and meanings are vLLM's.

This module checks only what needs no tokenizer: the kind of constraint and the type of its value. `raycore.grammar`
checks whether outputs can follow it.
"""

from __future__ import annotations

import json
from typing import Any, cast

import msgspec

from raycore.errors import InvalidRequest

MAX_CHARACTERS = 1 << 18
"""Limit of a constraint's text. The slowest of this size, with a few thousand patterns, took a second to compile."""
MAX_TAG_CHARACTERS = 64
"""Limit of the tag that closes the reasoning, which is searched for at every token."""
_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_SHOWN = 100
"""Limit of characters of a value in an error message."""


class StructuredOutputsParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Exactly one constraint, on the whole output or on the part after the reasoning. Needs llguidance:
    `pip install 'raycore[structured]'`.

    Raises:
        InvalidRequest: from the constructor, if none or several are given, or a value has the wrong type.
    """

    json: str | dict[str, Any] | None = None
    """The output is JSON that matches this schema, an object or text. The constructor converts it to text."""
    regex: str | None = None
    """The whole output matches this pattern, in the syntax of Rust's `regex`: no look-around, no back-references."""
    choice: list[str] | None = None
    """The output is one of these texts."""
    grammar: str | None = None
    """The output matches this context-free grammar, in GBNF or llguidance's variant of Lark."""
    json_object: bool | None = None
    """True: the output is any JSON object."""
    disable_any_whitespace: bool = False
    """True: JSON has no white space between its parts. False: up to 32 characters between two parts."""

    after: str | None = None
    """The tag that closes the reasoning, such as `</think>`. The output is constrained only after the first one. None:
    the whole output is constrained."""
    or_from: str | None = None
    """With `after`: another tag that ends the reasoning. It is also the beginning of the constrained part, so it has no
    effect if the constraint doesn't allow it there."""

    def __post_init__(self) -> None:
        if self.json_object is False:
            self.json_object = None
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise InvalidRequest(f"structured_outputs must have exactly one of {', '.join(_KINDS)}, not {found}")
        if isinstance(self.json, dict):
            self.json = _as_text(self.json)
        for name in ("json", "regex", "grammar"):
            setattr(self, name, _checked_text(name, getattr(self, name)))
        self._check_choice()
        self._check_tags()
        for name in ("json_object", "disable_any_whitespace"):
            value = getattr(self, name)
            if value is not True and value is not False and not (value is None and name == "json_object"):
                raise InvalidRequest(f"structured_outputs.{name}={value!r} isn't True or False")

    def __str__(self) -> str:
        """The constraint as in error messages, shortened."""
        name = next(name for name in _KINDS if getattr(self, name) is not None)
        value = repr(getattr(self, name))
        return f"structured_outputs.{name}={value[:_SHOWN]}{'…' if len(value) > _SHOWN else ''}"

    def _check_tags(self) -> None:
        for name in ("after", "or_from"):
            tag: Any = getattr(self, name)
            if tag is not None and (not isinstance(tag, str) or not 0 < len(tag) <= MAX_TAG_CHARACTERS):
                raise InvalidRequest(
                    f"structured_outputs.{name}={tag!r} isn't a string of 1 to {MAX_TAG_CHARACTERS} characters"
                )
            setattr(self, name, _checked_text(name, tag))
        if self.or_from is not None and self.after is None:
            raise InvalidRequest(
                f"structured_outputs.or_from={self.or_from!r} is given without structured_outputs.after: give both"
            )

    def _check_choice(self) -> None:
        given: Any = self.choice  # users may pass anything
        if given is None:
            return
        if not isinstance(given, list) or not given:
            raise InvalidRequest(f"structured_outputs.choice={given!r} isn't a list of at least one string")
        self.choice = [_checked_text("choice", text) or "" for text in cast("list[Any]", given)]
        _check_length("choice", sum(map(len, self.choice)))


def _as_text(schema: dict[str, Any]) -> str:
    try:
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"structured_outputs.json isn't a JSON schema: {error}") from error


def _checked_text(name: str, value: object) -> str | None:
    """`value` as a plain str."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise InvalidRequest(f"structured_outputs.{name} has {value!r}, which isn't a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"structured_outputs.{name}: character {error.start} is half of a surrogate pair"
        ) from None
    _check_length(name, len(value))
    return str.__str__(value)


def _check_length(name: str, length: int) -> None:
    if length > MAX_CHARACTERS:
        raise InvalidRequest(
            f"structured_outputs.{name} has {length} characters; at most {MAX_CHARACTERS} are compiled"
        )
