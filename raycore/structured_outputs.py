"""Constraints on outputs. Names and meanings are vLLM's.

This module checks only what needs no tokenizer: the kind of constraint and the type of its value. To compile the
constraint, which `raycore.parts.constraints.grammar` does, checks the rest.
"""

from __future__ import annotations

import json
from typing import Any, cast

import msgspec

from raycore.errors import InvalidRequest
from raycore.short_tracebacks import ends_traceback

MAX_CHARACTERS = 1 << 18
"""Maximum length of a constraint as text. The slowest measured constraint of this length, with a few thousand patterns,
took a second to compile."""
MAX_TAG_CHARACTERS = 64
"""Maximum length of a tag that ends the reasoning. Tags are searched for at every token."""
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_SHOWN = 100
"""How many characters of a value an error message shows."""


class StructuredOutputsParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A constraint on the whole output, or on the part after the reasoning. Exactly one kind of constraint is given.

    Needs llguidance: `pip install 'raycore[structured]'`.

    Raises:
        InvalidRequest: from the constructor, if no kind or several kinds are given, or a value has the wrong type.
    """

    json: str | dict[str, Any] | None = None
    """The output is JSON that matches this JSON schema, given as a dict or as text. The constructor converts a dict to
    text."""
    regex: str | None = None
    """The whole output matches this pattern, in the syntax of Rust's `regex`: no look-around, no back-references."""
    choice: list[str] | None = None
    """The output is one of these texts."""
    grammar: str | None = None
    """The output matches this context-free grammar, in GBNF or llguidance's variant of Lark."""
    json_object: bool | None = None
    """True: the output is any JSON object."""
    structural_tag: str | dict[str, Any] | None = None
    """The output is text in which the parts that begin with certain tags follow formats, such as a JSON schema each. A
    dict or JSON text in one of vLLM's forms: with `structures` and `triggers`, or with `format`. The constructor
    converts a dict to text."""
    disable_any_whitespace: bool = False
    """True: JSON has no white space between its parts. False: it may have up to 32 white-space characters there."""

    after: str | None = None
    """The tag that closes the reasoning, such as `</think>`. The output is constrained after the first such tag. None:
    the whole output is constrained."""
    or_from: str | None = None
    """With `after`: another tag that ends the reasoning, such as `<tool_call>`. The constrained part begins with this
    tag, so the tag has no effect if the constraint doesn't allow it as a beginning."""

    @ends_traceback
    def __post_init__(self) -> None:
        if self.json_object is False:
            self.json_object = None
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise InvalidRequest(f"structured_outputs must have exactly one of {', '.join(_KINDS)}, not {found}")
        if isinstance(self.json, dict):
            self.json = _as_text("json", "a JSON schema", self.json)
        if isinstance(self.structural_tag, dict):
            self.structural_tag = _as_text("structural_tag", "JSON", self.structural_tag)
        for name in ("json", "regex", "grammar", "structural_tag"):
            setattr(self, name, _checked_text(name, getattr(self, name)))
        self._check_choice()
        self._check_tags()
        for name in ("json_object", "disable_any_whitespace"):
            value = getattr(self, name)
            if value is not True and value is not False and not (value is None and name == "json_object"):
                raise InvalidRequest(f"structured_outputs.{name}={value!r} isn't True or False")

    def __str__(self) -> str:
        """The constraint as error messages show it, shortened."""
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


def _as_text(name: str, what: str, value: dict[str, Any]) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"structured_outputs.{name} isn't {what}: {error}") from error


def _checked_text(name: str, value: object) -> str | None:
    """`value` as a plain str, or None if `value` is None. `name` is the field's name, for error messages.

    Raises:
        InvalidRequest: `value` isn't text, can't be encoded as UTF-8, or is too long.
    """
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
